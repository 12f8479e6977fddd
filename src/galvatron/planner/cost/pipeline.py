"""From stages to an iteration (docs/cost-model.md, "Pipeline").

Paper Algorithm 1, line 9 sums the stages, which is the case of one micro-batch. With m micro-batches GPipe and 1F1B
both take the time one micro-batch needs through all stages, plus m − 1 times the slowest stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from galvatron.core.spec import Schedule

__all__ = ["Pace", "iteration_ns"]


@dataclass(frozen=True, slots=True)
class Pace:
    """How stages make an iteration, from the mean times of their micro-batches: total · Σ stages + slowest · the
    slowest."""

    total: float
    slowest: float

    @classmethod
    def of(cls, schedule: Schedule, stages: int, micro_batches: int, contention: float = 1.0) -> Pace:
        """The pace of a pipeline.

        Where each device has hardware of its own: all micro-batches through the slowest stage, and of one through the
        other stages the part that is the schedule's bubble. Where devices share cores (``contention``: how much slower
        each computes while all do), a stage that waits leaves its share to the others: the mean of the stages counts,
        and the bubble is that of the P/contention stages which can compute at full speed at once, at that speed.
        """
        if stages == 1:
            return cls(micro_batches, 0.0)
        alone = min(contention, stages)
        uneven = (stages / alone - 1) / alone / (stages - 1)
        return cls(
            uneven * schedule.bubble + (1 - uneven) * micro_batches / stages,
            uneven * (micro_batches - schedule.bubble),
        )

    def whole_ns(self, sum_ns: float, slowest_ns: float) -> float:
        """Of an iteration, in whole nanoseconds (exact without contention)."""
        return math.ceil(self.total * sum_ns + self.slowest * slowest_ns - 1e-6) if sum_ns < math.inf else math.inf


def iteration_ns(stage_ns: Sequence[int], pace: Pace) -> int:
    """Time of an iteration from the mean time of a micro-batch in each stage.

    Work done once an iteration (gradient synchronisation, optimizer step) is in that mean with its share 1/m: exact for
    the slowest stage, which sets the pace, and at most the other stages' shares too much in all.
    """
    return int(pace.whole_ns(sum(stage_ns), max(stage_ns)))
