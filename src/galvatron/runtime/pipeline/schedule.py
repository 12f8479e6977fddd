"""The order in which a stage runs its micro-batches: GPipe or 1F1B, or plain accumulation without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from galvatron.planner.cost.pipeline import Schedule, in_flight

__all__ = ["Action", "actions"]


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through the stage."""

    forward: bool
    micro_batch: int


def actions(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """What stage number ``stage`` does, in order.

    GPipe runs all forwards, then all backwards. 1F1B starts backwards as soon as they can be, so that stage p never
    has more than ``stages - p`` micro-batches in flight. A single stage finishes each micro-batch before the next.
    """
    ahead = in_flight(stage, stages, micro_batches, schedule)
    for number in range(ahead):
        yield Action(True, number)
    for number in range(micro_batches):
        yield Action(False, number)
        if ahead + number < micro_batches:
            yield Action(True, ahead + number)
