"""From stages to an iteration (docs/cost-model.md, "Pipeline").

Paper Algorithm 1, line 9 sums the stages, which is the case of one micro-batch. With m micro-batches GPipe and 1F1B
both take the time one micro-batch needs through all stages, plus m − 1 times the slowest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

__all__ = ["Schedule", "in_flight", "iteration_ns"]


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


def iteration_ns(stage_ns: Sequence[int], micro_batches: int) -> int:
    """Time of an iteration from the mean time of a micro-batch in each stage.

    Work done once an iteration (gradient synchronisation, optimizer step) is in that mean with its share 1/m: exact for
    the slowest stage, which sets the pace, and at most the other stages' shares too much in all.
    """
    return sum(stage_ns) + (micro_batches - 1) * max(stage_ns)
