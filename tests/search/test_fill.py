"""Equal layers of one layout: counts of strategies against every multiset of them."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np

from galvatron.cost import Integers
from galvatron.search.fill import fill


def _random_table(rng: np.random.Generator) -> tuple[Integers, Integers]:
    """Strategies by growing memory and falling time, some of them on no edge of the hull."""
    count = int(rng.integers(1, 7))
    memory = np.sort(rng.choice(np.arange(1, 60), count, replace=False))
    time = np.sort(rng.choice(np.arange(1, 80), count, replace=False))[::-1].copy()
    return time.astype(np.int64), memory.astype(np.int64)


def _brute(time: Integers, memory: Integers, layers: int, budget: int) -> float:
    choices = combinations_with_replacement(range(len(time)), layers)
    totals = (sum(int(time[i]) for i in choice) for choice in choices if sum(int(memory[i]) for i in choice) <= budget)
    return min(totals, default=np.inf)


def test_fill_finds_the_best_multiset() -> None:
    """A multiset cheaper than the one found, or one that does not fit, would show here."""
    rng = np.random.default_rng(20)
    feasible = 0
    for _ in range(800):
        time, memory = _random_table(rng)
        layers = int(rng.integers(0, 8))
        budget = int(rng.integers(0, 60 * max(layers, 1)))
        cutoff = float(rng.choice([np.inf, 60.0, 150.0]))
        best = _brute(time, memory, layers, budget)
        filling = fill(time, memory, layers, budget, cutoff)
        if best >= cutoff:
            assert filling is None
            continue
        feasible += 1
        assert filling is not None
        assert filling.time == best == np.dot(filling.counts, time)
        assert sum(filling.counts) == layers
        assert np.dot(filling.counts, memory) <= budget
    assert feasible > 300


def test_fill_matches_a_table_on_many_layers() -> None:
    """Hundreds of layers, where enumerating is hopeless: an exact table over every byte of a small budget."""
    rng = np.random.default_rng(21)
    for _ in range(10):
        time, memory = _random_table(rng)
        layers = 300
        budget = int(rng.integers(int(memory[0]) * layers, int(memory[-1]) * layers + 1))
        best = np.full(budget + 1, np.inf)
        best[0] = 0.0
        for _layer in range(layers):
            longer = np.full(budget + 1, np.inf)
            for t, m in zip(time.tolist(), memory.tolist(), strict=True):
                longer[m:] = np.minimum(longer[m:], best[: budget + 1 - m] + t)
            best = longer
        filling = fill(time, memory, layers, budget, np.inf)
        assert filling is not None
        assert filling.time == best.min()
