"""The order of passes in each stage: complete, causal, and with no more micro-batches in flight than were planned."""

from __future__ import annotations

from itertools import product

import pytest

from galvatron.planner.cost import Schedule, in_flight
from galvatron.runtime.pipeline.schedule import actions

_PIPELINES = [
    (schedule, stages, micro_batches)
    for schedule, stages, micro_batches in product(Schedule, (1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 16))
]


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), _PIPELINES)
def test_every_micro_batch_passes_once_each_way_in_order(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """In order, so that neighbouring stages send and receive the same micro-batch."""
    for stage in range(stages):
        order = list(actions(schedule, stage, stages, micro_batches))
        for forward in (True, False):
            assert [action.micro_batch for action in order if action.forward is forward] == list(range(micro_batches))


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), _PIPELINES)
def test_as_many_in_flight_as_planned(schedule: Schedule, stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        flying, most = 0, 0
        for action in actions(schedule, stage, stages, micro_batches):
            flying += 1 if action.forward else -1
            assert flying >= 0, "backward before forward"
            most = max(most, flying)
        assert most == in_flight(stage, stages, micro_batches, schedule)


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), _PIPELINES)
def test_nobody_waits_for_ever(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Stages take turns: a forward needs the stage before to have done it, a backward the stage after."""
    left = [list(actions(schedule, stage, stages, micro_batches)) for stage in range(stages)]
    done: set[tuple[int, bool, int]] = set()
    while any(left):
        ready = [
            stage
            for stage, order in enumerate(left)
            if order
            and (
                (order[0].forward and (stage == 0 or (stage - 1, True, order[0].micro_batch) in done))
                or (not order[0].forward and (stage == stages - 1 or (stage + 1, False, order[0].micro_batch) in done))
            )
        ]
        assert ready, "a deadlock"
        for stage in ready:
            action = left[stage].pop(0)
            done.add((stage, action.forward, action.micro_batch))


def test_1f1b_starts_backwards_before_all_forwards_are_done() -> None:
    """What tells the two schedules apart, in the first of two stages."""
    letters = {
        schedule: "".join("F" if action.forward else "B" for action in actions(schedule, 0, 2, 4))
        for schedule in Schedule
    }
    assert letters == {Schedule.GPIPE: "FFFFBBBB", Schedule.ONE_F_ONE_B: "FFBFBFBB"}
