"""The iteration formula and in-flight counts against a simulation of the schedules, event by event."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron.core.spec import GPIPE, ONE_F_ONE_B, Schedule
from galvatron.planner.cost import Pace, iteration_ns

Order = list[list[tuple[str, int]]]


def gpipe(stages: int, micro_batches: int) -> Order:
    work = [("f", i) for i in range(micro_batches)] + [("b", i) for i in range(micro_batches)]
    return [list(work) for _ in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> Order:
    orders = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - stage)
        order = [("f", i) for i in range(warm_up)]
        for i in range(micro_batches):
            order.append(("b", i))
            if warm_up + i < micro_batches:
                order.append(("f", warm_up + i))
        orders.append(order)
    return orders


def simulate(orders: Order, forward: list[int], backward: list[int]) -> tuple[int, list[int]]:
    """(makespan, most micro-batches held) when each stage does its work in order, as soon as its inputs are there."""
    stages = len(orders)
    done: dict[tuple[str, int, int], int] = {}
    clock, at = [0] * stages, [0] * stages
    held, peak = [0] * stages, [0] * stages
    while any(at[p] < len(orders[p]) for p in range(stages)):
        for p in range(stages):
            if at[p] == len(orders[p]):
                continue
            kind, i = orders[p][at[p]]
            needs = [("f", p - 1, i)] if kind == "f" else [("b", p + 1, i), ("f", p, i)]
            needs = [need for need in needs if 0 <= need[1] < stages]
            if all(need in done for need in needs):
                start = max([clock[p], *(done[need] for need in needs)])
                clock[p] = done[kind, p, i] = start + (forward[p] if kind == "f" else backward[p])
                held[p] += 1 if kind == "f" else -1
                peak[p] = max(peak[p], held[p])
                at[p] += 1
    return max(clock), peak


@pytest.mark.parametrize(("stages", "micro_batches"), list(itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 8, 16))))
def test_formula_is_exact_for_stages_of_one_shape(stages: int, micro_batches: int) -> None:
    """Uneven stages whose backward is twice their forward: GPipe's makespan is the formula's, to the tick."""
    forward = [7 + 3 * (p % 3) for p in range(stages)]
    backward = [2 * f for f in forward]
    total, held = simulate(gpipe(stages, micro_batches), forward, backward)
    assert total == iteration_ns([3 * f for f in forward], Pace.of(GPIPE, stages, micro_batches))
    if stages > 1:
        assert held == [GPIPE.in_flight(p, stages, micro_batches) for p in range(stages)]


@pytest.mark.parametrize(("stages", "extra"), list(itertools.product((2, 3, 4, 8), (0, 1, 5, 12))))
def test_one_f_one_b_holds_fewer_and_takes_as_long(stages: int, extra: int) -> None:
    micro_batches = stages + extra
    total, held = simulate(one_f_one_b(stages, micro_batches), [10] * stages, [20] * stages)
    assert total == iteration_ns([30] * stages, Pace.of(ONE_F_ONE_B, stages, micro_batches))
    assert held == [ONE_F_ONE_B.in_flight(p, stages, micro_batches) for p in range(stages)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 100)), min_size=1, max_size=6), st.integers(1, 12))
def test_formula_never_exceeds_gpipe_and_is_close(stages: list[tuple[int, int]], micro_batches: int) -> None:
    """Whatever the shapes: below the true makespan by no more than the mismatch of slowest forward and backward."""
    forward, backward = [f for f, _ in stages], [b for _, b in stages]
    total, _ = simulate(gpipe(len(stages), micro_batches), forward, backward)
    formula = iteration_ns([f + b for f, b in stages], Pace.of(GPIPE, len(stages), micro_batches))
    mismatch = max(forward) + max(backward) - max(f + b for f, b in stages)
    assert total - (micro_batches - 1) * mismatch <= formula <= total


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=6), st.integers(1, 12))
def test_work_done_once_is_never_underestimated(stages: list[tuple[int, int]], micro_batches: int) -> None:
    """Stages (s, o): true time is Σ s + max((m − 1)·s + o); charging o/m to each micro-batch adds at most Σ o/m."""
    m = micro_batches
    true = sum(s for s, _ in stages) + max((m - 1) * s + o for s, o in stages)
    priced = sum(s + o / m for s, o in stages) + (m - 1) * max(s + o / m for s, o in stages)
    assert true - 1e-9 <= priced <= true + sum(o for _, o in stages) / m + 1e-9


def simulate_shared(orders: Order, forward: list[float], backward: list[float], contention: float) -> float:
    """Makespan when stages share cores: as many as are busy divide them evenly, none is faster than alone.

    Times are those of a stage while all are busy.
    """
    stages = len(orders)
    left: list[float | None] = [None] * stages
    at = [0] * stages
    done: set[tuple[str, int, int]] = set()
    clock = 0.0
    while any(at[p] < len(orders[p]) for p in range(stages)):
        for p in range(stages):
            if left[p] is None and at[p] < len(orders[p]):
                kind, i = orders[p][at[p]]
                needs = [("f", p - 1, i)] if kind == "f" else [("b", p + 1, i), ("f", p, i)]
                if all(need in done for need in needs if 0 <= need[1] < stages):
                    left[p] = forward[p] if kind == "f" else backward[p]
        busy = {p: rest for p, rest in enumerate(left) if rest is not None}
        first = min(busy.values())
        clock += first / min(contention, stages / len(busy))
        for p, rest in busy.items():
            left[p] = rest - first
            if rest - first < 1e-9:
                kind, i = orders[p][at[p]]
                done.add((kind, p, i))
                at[p], left[p] = at[p] + 1, None
    return clock


@pytest.mark.parametrize(("schedule", "order"), [(GPIPE, gpipe), (ONE_F_ONE_B, one_f_one_b)])
@pytest.mark.parametrize("contention", [1.0, 1.5, 2.0, 4.0, 8.0])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8), (8, 16)])
def test_stages_that_share_cores(
    schedule: Schedule, order: Callable[[int, int], Order], contention: float, stages: int, micro_batches: int
) -> None:
    """A stage that waits leaves its share to the others; the bubble shrinks, and is gone where one stage fills all."""
    total = simulate_shared(order(stages, micro_batches), [10.0] * stages, [20.0] * stages, contention)
    formula = iteration_ns([30] * stages, Pace.of(schedule, stages, micro_batches, contention))
    assert formula == pytest.approx(total, rel=0.06)
    if contention == 1:
        assert formula == total
    if contention >= stages:
        assert formula == 30 * micro_batches


def test_uneven_stages_that_share_all_cores_take_their_mean() -> None:
    stages = [10, 50, 30]
    total = simulate_shared(gpipe(3, 6), [s / 3 for s in stages], [2 * s / 3 for s in stages], 3.0)
    assert iteration_ns(stages, Pace.of(GPIPE, 3, 6, 3.0)) == pytest.approx(total, rel=0.01)
    assert iteration_ns(stages, Pace.of(GPIPE, 3, 6)) > 1.5 * total, (
        "on hardware of their own the slowest sets the pace"
    )
