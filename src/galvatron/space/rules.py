"""The paper's takeaways as named rules (Section 3.2).

The first two shape the space as it is built; the third removes candidates and can be turned off, because it is a
heuristic: hybrid sharding (DP over SDP) moves less over slow links than SDP over all devices does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from galvatron.spec.strategy import Kind, Strategy

__all__ = ["RULES", "TAKEAWAY_1", "TAKEAWAY_2", "TAKEAWAY_3", "Rule"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the space: what it says, and whether it merely prunes."""

    name: str
    statement: str
    forbids: Callable[[Strategy], bool] | None = None
    """What a pruning rule removes, which may be turned off; None: the rule is part of how the space is built."""

    @property
    def prunes(self) -> bool:
        return self.forbids is not None


TAKEAWAY_1 = Rule(
    "takeaway-1",
    "Pipeline stages are consecutive blocks of devices, so the pipeline crosses the slow links between islands.",
)
TAKEAWAY_2 = Rule(
    "takeaway-2",
    "Every parallelism divides devices into groups of equal size; only pipeline stages may differ in strategy.",
)
TAKEAWAY_3 = Rule(
    "takeaway-3",
    "DP and SDP are not combined in one layer.",
    forbids=lambda strategy: strategy.degree(Kind.DP) > 1 and strategy.degree(Kind.SDP) > 1,
)
RULES = (TAKEAWAY_1, TAKEAWAY_2, TAKEAWAY_3)
