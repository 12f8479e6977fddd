"""What was read of another system's layout, ready to be priced."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron.core.spec.schedule import Schedule
from galvatron.planner.exchange.uniform import Uniform

__all__ = ["Reading"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A layout, and what of its description is priced otherwise or not at all."""

    layout: Uniform
    schedule: Schedule
    remarks: tuple[str, ...]
    """What is priced as something near, a sentence each."""
    unpriced: tuple[str, ...]
    """Options that change speed or memory and are not priced."""
    unknown: tuple[str, ...]
    """Options that we know nothing of."""
