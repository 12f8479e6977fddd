"""Equal layers of one layout: how many take each strategy, against a table over memory.

What would break: a combination of strategies dropped because its reduced cost was rounded, or so many kept that memory
runs out.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from search_oracles import Rng

from galvatron.planner.cost import NEVER, Integers
from galvatron.planner.search.choices import Useful
from galvatron.planner.search.completions import Completions
from galvatron.planner.search.fill import Filling, fill, quick_fill


def _frontier(rng: Rng, strategies: int, top_time: int, top_memory: int) -> tuple[Integers, Integers]:
    """Strategies of growing memory and falling time, some of them on one line, some above it."""
    memory = np.sort(rng.choice(top_memory, min(strategies, top_memory), replace=False))
    time = np.sort(rng.choice(top_time, len(memory), replace=False))[::-1]
    if rng.random() < 0.3:
        time = 2 * (memory[-1] - memory) + 1
    return time.astype(np.int64), memory.astype(np.int64)


def _least_time(time: Integers, memory: Integers, layers: int, budget: int) -> int | None:
    """Layer by layer over the memory used so far."""
    reached = {0: 0}
    for _ in range(layers):
        after: dict[int, int] = {}
        for used, spent in reached.items():
            for more, longer in zip(memory.tolist(), time.tolist(), strict=True):
                if used + more <= budget and spent + longer < after.get(used + more, 1 << 60):
                    after[used + more] = spent + longer
        reached = after
    return min(reached.values(), default=None)


def _check(filling: Filling, time: Integers, memory: Integers, layers: int, budget: int) -> None:
    counts = np.array(filling.counts)
    assert counts.min() >= 0
    assert counts.sum() == layers
    assert counts @ time == filling.time
    assert counts @ memory <= budget


@pytest.mark.parametrize("seed", range(4))
def test_equals_a_table_over_memory(seed: int) -> None:
    """800 cases of up to 30 layers and 7 strategies; the cutoff is exclusive, as everywhere."""
    rng = np.random.default_rng(seed)
    feasible = 0
    for _ in range(200):
        top_time = int(rng.choice([10, 200, 10**6]))
        time, memory = _frontier(rng, int(rng.integers(1, 8)), top_time, top_memory=int(rng.choice([8, 25])))
        layers = int(rng.integers(0, 31))
        budget = int(layers * (memory[0] + (memory[-1] - memory[0]) * rng.uniform(-0.1, 1.1)))
        expected = _least_time(time, memory, layers, budget)
        filling = fill(time, memory, layers, budget, 1 << 44)
        assert (filling.time if filling else None) == expected
        if filling is not None:
            feasible += 1
            _check(filling, time, memory, layers, budget)
            assert fill(time, memory, layers, budget, filling.time) is None
            again = fill(time, memory, layers, budget, filling.time + 1)
            assert again is not None
            assert again.time == filling.time
    assert feasible > 100


@pytest.mark.parametrize("seed", range(2))
def test_many_at_once_are_bounded_from_both_sides(seed: int) -> None:
    """A quick filling exists wherever one fits and is never faster than the best. Sums of whole strategies give the
    time of the best where it is within the slack, and elsewhere none that is faster."""
    rng = np.random.default_rng((3, seed))
    met = 0
    for _ in range(100):
        time, memory = _frontier(rng, int(rng.integers(1, 8)), int(rng.choice([10, 200, 10**6])), top_memory=25)
        layers = rng.integers(0, 20, 6)
        room = (layers * (memory[0] + (memory[-1] - memory[0]) * rng.uniform(-0.1, 1.1, 6))).astype(np.int64)
        best = [_least_time(time, memory, int(n), int(b)) for n, b in zip(layers, room, strict=True)]
        exact = np.array([np.inf if each is None else each for each in best])
        quick = quick_fill(time, memory, layers, room)
        assert (np.isfinite(quick) == np.isfinite(exact)).all()
        assert (quick >= exact).all()
        lam = float(rng.uniform(0, 2) * time.max() / max(1, memory.max()))
        nothing = np.zeros(len(time), dtype=np.int64)
        table = Useful(np.arange(len(time)), time, memory, nothing)
        slack = float(rng.choice([0, 5, 10**7]))
        least = Completions({0: table}, [], 0, lam, int(room.max())).within(slack).of_equal(layers, room)
        reduced = exact + lam * room - layers * (time + lam * memory).min()
        assert (least[reduced <= slack] == exact[reduced <= slack]).all()
        assert (least >= np.minimum(exact, NEVER)).all(), "no sum is invented"
        met += int((reduced <= slack).sum())
    assert met > 100


def test_memory_that_every_strategy_needs_changes_nothing() -> None:
    """Gigabytes on top of each layer and of the budget leave the counts' time as it was, to the nanosecond."""
    rng = np.random.default_rng(5)
    for trial in range(300):
        time, memory = _frontier(rng, int(rng.integers(2, 7)), top_time=20, top_memory=12)
        time = time + int(10 ** rng.uniform(3, 7)) * (memory[-1] - memory)  # steep, with small differences on top
        layers = int(rng.integers(1, 60))
        budget = int(layers * (memory[0] + (memory[-1] - memory[0]) * rng.uniform(0, 1)))
        base = int(10 ** rng.uniform(7, 9.5))
        plain = fill(time, memory, layers, budget, 1 << 44)
        lifted = fill(time, memory + base, layers, budget + base * layers, 1 << 44)
        assert (plain.time if plain else None) == (lifted.time if lifted else None), trial


@pytest.mark.parametrize(
    ("strategies", "layers"),
    [
        (8, 40),
        (11, 96),
    ],
)
def test_strategies_on_one_line_do_not_multiply(strategies: int, layers: int) -> None:
    """All trade time for memory at one rate, so any mixture of equal memory is as good: none may be listed twice."""
    index = np.arange(strategies)
    time, memory = 1000 * (strategies - 1 - index) + 500, 2 * index + 10
    budget = layers * (10 + strategies - 1) + 1  # odd: the bound is never reached
    tracemalloc.start()
    try:
        filling = fill(time, memory, layers, budget, 1 << 44)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert filling is not None
    _check(filling, time, memory, layers, budget)
    assert filling.time == 500 * layers + 1000 * (layers * (strategies - 1) // 2)
    assert peak < 64 * 2**20
