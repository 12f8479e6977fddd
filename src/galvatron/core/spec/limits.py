"""What a user rules out of a space: layers that keep a strategy, parallelism that stays inside islands, and the like.

Facts only; what they leave of a space is :mod:`galvatron.planner.plan.limiting`'s.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Limits", "Pin"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """A kind of layer keeps a strategy."""

    layer: str
    """The name of the kind."""
    strategy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Plans outside of these are not searched, so the best one inside is found exactly."""

    pins: tuple[Pin, ...] = ()
    forbid: tuple[str, ...] = ()
    """``tp``: no TP at all; ``tp:node``: none that leaves a node. DP, SDP and EP likewise."""
    pipeline_degree: int | None = None
    """Exactly so many stages."""
    max_micro_batch: int | None = None
    """Most samples of a micro-batch."""

    def __bool__(self) -> bool:
        return self != Limits()

    def __str__(self) -> str:
        said = [f"--pin {pin.layer}={pin.strategy}" for pin in self.pins]
        said += [f"--forbid {each}" for each in self.forbid]
        said += [] if self.pipeline_degree is None else [f"--pipeline {self.pipeline_degree}"]
        said += [] if self.max_micro_batch is None else [f"--max-micro-batch {self.max_micro_batch}"]
        return " ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """As plan files have it."""
        return asdict(self)
