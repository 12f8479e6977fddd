"""From stages to an iteration (docs/cost-model.md, "Pipeline").

Paper Algorithm 1, line 9 sums the stages, which is the case of one micro-batch. With m micro-batches GPipe and 1F1B
both take the time one micro-batch needs through all stages, plus m − 1 times the slowest stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Pace", "Schedule", "in_flight", "iteration_ns"]


class Schedule(StrEnum):
    """Order in which a stage runs forward and backward of its micro-batches."""

    GPIPE = "gpipe"
    """All forwards, then all backwards: every micro-batch's activations are alive at once."""
    ONE_F_ONE_B = "1f1b"
    """Backward as early as possible: a stage holds no more micro-batches than there are stages from it to the end."""


def in_flight(stage: int, stages: int, micro_batches: int, schedule: Schedule) -> int:
    """Micro-batches whose activations a stage holds at its peak.

    Without a pipeline each micro-batch runs backward before the next one starts.
    """
    if stages == 1:
        return 1
    if schedule is Schedule.GPIPE:
        return micro_batches
    return min(micro_batches, stages - stage)


@dataclass(frozen=True, slots=True)
class Pace:
    """How stages make an iteration, from the mean times of their micro-batches: total · Σ stages + slowest · the
    slowest."""

    total: float
    slowest: float

    @classmethod
    def of(cls, stages: int, micro_batches: int, contention: float = 1.0) -> Pace:
        """The pace of a pipeline.

        Where each device has hardware of its own: one micro-batch through all stages, and the slowest stage again for
        each further one. Where devices share cores (``contention``: how much slower each computes while all do), a
        stage that waits leaves its share to the others: the mean of the stages counts, and the bubble is that of the
        P/contention stages which can compute at full speed at once, at that speed.
        """
        if stages == 1:
            return cls(micro_batches, 0.0)
        alone = min(contention, stages)
        bubble = (stages / alone - 1) / alone
        uneven = bubble / (stages - 1)
        return cls(uneven + (1 - uneven) * micro_batches / stages, uneven * (micro_batches - 1))

    def whole_ns(self, sum_ns: float, slowest_ns: float) -> float:
        """Of an iteration, in whole nanoseconds (exact without contention)."""
        return math.ceil(self.total * sum_ns + self.slowest * slowest_ns - 1e-6) if sum_ns < math.inf else math.inf


def iteration_ns(stage_ns: Sequence[int], pace: Pace) -> int:
    """Time of an iteration from the mean time of a micro-batch in each stage.

    Work done once an iteration (gradient synchronisation, optimizer step) is in that mean with its share 1/m: exact for
    the slowest stage, which sets the pace, and at most the other stages' shares too much in all.
    """
    return int(pace.whole_ns(sum(stage_ns), max(stage_ns)))
