"""What every schedule promises: passes that are complete and causal, and formulas for memory and time that are those of
its passes, found by simulating them."""

from __future__ import annotations

import math
from itertools import product

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import GPIPE, ONE_F_ONE_B, SCHEDULES, Action, Pass, Schedule, schedule_named
from galvatron.planner.cost import Pace, iteration_ns

Place = tuple[Pass, int, int]
"""A pass, its place among all chunks of all stages in the order of the model's layers, and its micro-batch."""

_MICRO_BATCHES = (*range(1, 10), 12, 16, 24)
_PIPELINES = [
    pytest.param(schedule, stages, id=f"{schedule.name}-{stages}")
    for schedule, stages in product(SCHEDULES, range(1, 9))
    if any(schedule.runs(stages, micro_batches) for micro_batches in _MICRO_BATCHES)
]
every_pipeline = pytest.mark.parametrize(("schedule", "stages"), _PIPELINES)


def counts(schedule: Schedule, stages: int) -> list[int]:
    """Of micro-batches that the pipeline may have."""
    return [micro_batches for micro_batches in _MICRO_BATCHES if schedule.runs(stages, micro_batches)]


def orders(schedule: Schedule, stages: int, micro_batches: int) -> list[tuple[Action, ...]]:
    return [schedule.actions(stage, stages, micro_batches) for stage in range(stages)]


def simulate(lists: list[tuple[Action, ...]], chunks: int, forward: int, backward: int) -> int:
    """When all is done, where each stage does its passes in order, each as soon as what it needs is there."""
    stages = len(lists)
    done: dict[Place, int] = {}
    clock, at = [0] * stages, [0] * stages
    while any(at[p] < len(lists[p]) for p in range(stages)):
        before = sum(at)
        for p, actions in enumerate(lists):
            while at[p] < len(actions):
                action = actions[at[p]]
                place = action.chunk * stages + p
                needs: list[Place] = []
                if action.kind is Pass.FORWARD:
                    needs += [(Pass.FORWARD, place - 1, action.micro_batch)] if place else []
                else:
                    needs += [(Pass.FORWARD, place, action.micro_batch)]
                    needs += [(Pass.BACKWARD, place + 1, action.micro_batch)] if place + 1 < stages * chunks else []
                if not all(need in done for need in needs):
                    break
                start = max([clock[p], *(done[need] for need in needs)])
                clock[p] = start + (forward if action.kind is Pass.FORWARD else backward)
                done[action.kind, place, action.micro_batch] = clock[p]
                at[p] += 1
        assert sum(at) > before, "a deadlock: every stage waits for another"
    return max(clock)


def peak(actions: tuple[Action, ...]) -> int:
    """Most forwards without their backward."""
    held, most = set(), 0
    for action in actions:
        key = (action.micro_batch, action.chunk)
        if action.kind is Pass.FORWARD:
            held.add(key)
        else:
            held.remove(key)  # fails for a backward before its forward
        most = max(most, len(held))
    return most


@every_pipeline
def test_every_micro_batch_passes_every_chunk_once_each_way(schedule: Schedule, stages: int) -> None:
    """And in order over each boundary, so that neighbouring stages send and receive the same micro-batch."""
    chunks = schedule.chunks if stages > 1 else 1
    for micro_batches in counts(schedule, stages):
        for actions in orders(schedule, stages, micro_batches):
            assert len(actions) == 2 * chunks * micro_batches
            for kind, chunk in product(Pass, range(chunks)):
                passed = [each.micro_batch for each in actions if each.kind is kind and each.chunk == chunk]
                assert passed == list(range(micro_batches))


@every_pipeline
def test_as_many_in_flight_as_priced(schedule: Schedule, stages: int) -> None:
    chunks = schedule.chunks if stages > 1 else 1
    for micro_batches in counts(schedule, stages):
        held = [math.ceil(peak(actions) / chunks) for actions in orders(schedule, stages, micro_batches)]
        assert [schedule.in_flight(stage, stages, micro_batches) for stage in range(stages)] == held, micro_batches
        assert min(held) == held[-1], "bounds of the search count what the last stage holds"


@every_pipeline
def test_the_bubble_is_the_priced_one(schedule: Schedule, stages: int) -> None:
    """Equal stages, whose backward is twice their forward."""
    chunks = schedule.chunks if stages > 1 else 1
    work = 3 * chunks
    for micro_batches in counts(schedule, stages):
        total = simulate(orders(schedule, stages, micro_batches), chunks, forward=1, backward=2)
        assert iteration_ns([work] * stages, Pace.of(schedule, stages, micro_batches)) == total, micro_batches
        assert total - micro_batches * work == schedule.bubble * (stages - 1) * work, micro_batches


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_channels_are_shared_only_where_gradients_wait_for_all_activations(schedule: Schedule) -> None:
    """Otherwise a stage may send an activation while the next one sends it a gradient."""
    kinds = [action.kind for action in schedule.actions(0, 2, 4)]
    mixed = Pass.FORWARD in kinds[kinds.index(Pass.BACKWARD) :]
    assert schedule.both_ways_at_once is mixed


def test_1f1b_starts_backwards_before_all_forwards_are_done() -> None:
    """What tells the two schedules apart, in the first of two stages."""
    letters = {
        schedule.name: "".join(action.kind[0] for action in schedule.actions(0, 2, 4))
        for schedule in (GPIPE, ONE_F_ONE_B)
    }
    assert letters == {"gpipe": "ffffbbbb", "1f1b": "ffbfbfbb"}


def test_1f1b_needs_a_micro_batch_for_each_stage() -> None:
    assert [ONE_F_ONE_B.least_micro_batches(stages) for stages in (1, 2, 8)] == [1, 2, 8]
    assert GPIPE.least_micro_batches(8) == 1


def test_names_are_those_of_plan_files() -> None:
    assert [schedule_named(name) for name in ("gpipe", "1f1b")] == [GPIPE, ONE_F_ONE_B]
    with pytest.raises(InvalidInput, match="schedule: '2f2b' is unknown; choose one of gpipe, 1f1b"):
        schedule_named("2f2b")
