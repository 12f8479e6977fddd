"""What was read of another system's layout, ready to be priced; what the readers of all systems check."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.schedule import Schedule
from galvatron.planner.exchange.uniform import Uniform

__all__ = ["Reading", "check_spelling", "check_stages", "is_whole"]

_WHOLE = re.compile("[0-9]{1,18}")


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


def is_whole(text: str) -> bool:
    """Whether a text is a whole number that a flag can have."""
    return _WHOLE.fullmatch(text) is not None


def check_spelling(name: str, known: Iterable[str], system: str, dashes: str = "") -> None:
    """Raise for a name that is nearly one of the layout's: without it another layout would be priced."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.85)
    if close:
        raise InvalidInput(f"from: {dashes}{name} is no option of {system}; did you mean {dashes}{close[0]}?")


def check_stages(blocks: tuple[int, ...]) -> None:
    """Raise for stages that have nothing to run: the first has the embedding, the last the head, the others need
    blocks."""
    if min(blocks) < 0 or 0 in blocks[1:-1]:
        raise InvalidInput(
            f"from: the stages get {', '.join(map(str, blocks))} blocks; expected at least one in each between the "
            "first and the last"
        )
