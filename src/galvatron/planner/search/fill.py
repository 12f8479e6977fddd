"""Many equal layers of one layout: how many take each strategy, exactly.

Their order does not matter, so this is a knapsack over counts. Two strategies next to each other on the convex hull of
(memory, time) make up almost all of the optimum; each use of any other costs its *reduced cost* on top of the linear
bound. All combinations of others whose reduced costs fit the gap between bound and best solution are tried, each filled
up with the two by a closed formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron.planner.cost import Integers
from galvatron.planner.search.bounds import Floats

__all__ = ["Filling", "fill", "quick_fill"]


@dataclass(frozen=True, slots=True)
class Filling:
    """Counts of each strategy, and their total time."""

    time: int
    counts: tuple[int, ...]


def fill(time: Integers, memory: Integers, layers: int, budget: int, cutoff: float) -> Filling | None:
    """Least time for this many layers within the budget, or None when it is not below the cutoff.

    Strategies must be sorted by growing memory and falling time.
    """
    if layers == 0:
        return Filling(0, (0,) * len(time)) if cutoff > 0 and budget >= 0 else None
    if int(memory[0]) * layers > budget:
        return None
    fast, slow = _basis(time, memory, budget / layers)
    if fast == slow:  # the fastest fits everywhere
        total = int(time[fast]) * layers
        counts = tuple(layers if index == fast else 0 for index in range(len(time)))
        return Filling(total, counts) if total < cutoff else None
    return _Knapsack(time, memory, layers, budget, fast, slow).solve(cutoff)


def quick_fill(time: Integers, memory: Integers, layers: Integers, budgets: Integers) -> Floats:
    """Of many such problems at once: the time of some filling, made of two strategies; inf where nothing fits."""
    hull = np.array(_hull(time, memory))
    place = np.searchsorted(memory[hull], budgets / np.maximum(layers, 1), side="right") - 1
    slow, fast = hull[np.maximum(place, 0)], hull[np.minimum(place + 1, len(hull) - 1)]
    room, extra = budgets - layers * memory[slow], memory[fast] - memory[slow]
    faster = np.where(extra > 0, np.minimum(room // np.maximum(extra, 1), layers), 0)
    return np.where(room >= 0, layers * time[slow] - faster * (time[slow] - time[fast]), np.inf)


def _hull(time: Integers, memory: Integers) -> list[int]:
    """Indices of the strategies on the convex hull."""
    hull = [0]
    for index in range(1, len(time)):
        while len(hull) > 1 and _slope(time, memory, hull[-2], hull[-1]) <= _slope(time, memory, hull[-1], index):
            hull.pop()
        hull.append(index)
    return hull


def _basis(time: Integers, memory: Integers, share: float) -> tuple[int, int]:
    """Indices (fast, slow) of the hull's edge that a layer's share of the budget falls on."""
    hull = _hull(time, memory)
    below = [index for index in hull if memory[index] <= share]
    position = len(below) - 1
    return (hull[-1], hull[-1]) if position == len(hull) - 1 else (hull[position + 1], hull[position])


def _slope(time: Integers, memory: Integers, left: int, right: int) -> float:
    """Time saved for a byte between two strategies; falls along a convex hull."""
    return float((time[left] - time[right]) / (memory[right] - memory[left]))


class _Knapsack:
    def __init__(self, time: Integers, memory: Integers, layers: int, budget: int, fast: int, slow: int) -> None:
        self.time, self.memory, self.layers, self.budget = time, memory, layers, budget
        self.fast, self.slow = fast, slow
        price = _slope(time, memory, slow, fast)
        # Memory counts from the slow strategy's, so that prices times bytes stay small and accurate.
        self.reduced = np.maximum(time - time[slow] + price * (memory - memory[slow]), 0.0)
        self.bound = layers * int(time[slow]) - price * (budget - layers * int(memory[slow]))

    def solve(self, cutoff: float) -> Filling | None:
        others = [index for index in np.argsort(-self.reduced).tolist() if index not in (self.fast, self.slow)]
        used = np.zeros((1, len(self.time)), dtype=np.int64)
        best, best_time = self._filled_up(used, cutoff)
        for index in others:
            used = self._with(used, index, best_time)
            found, best_time = self._filled_up(used, best_time)
            best = found if found is not None else best
        if best is None:
            return None
        return Filling(int(best @ self.time), tuple(best.tolist()))

    def _with(self, used: Integers, index: int, cutoff: float) -> Integers:
        """All that may still beat the cutoff when this strategy, too, may be used any number of times; without those
        that another with as many layers beats in memory and time."""
        left = np.clip(cutoff - 0.5 - self.bound - used @ self.reduced, 0, None)
        taken = used.sum(axis=1)
        most = np.minimum(self.layers - taken, np.floor(left / max(self.reduced[index], 1e-9))).astype(np.int64)
        rows = np.repeat(np.arange(len(used)), most + 1)
        times = np.arange(len(rows)) - np.repeat(np.cumsum(most + 1) - (most + 1), most + 1)
        count = taken[rows] + times
        memory = (used @ self.memory)[rows] + times * self.memory[index]
        # What leaves too little for the layers to come, at the least each of them can take, need not be kept.
        fits = memory + (self.layers - count) * self.memory[0] <= self.budget
        rows, times, count, memory = rows[fits], times[fits], count[fits], memory[fits]
        time = (used @ self.time)[rows] + times * self.time[index]
        order = np.lexsort((time, memory, count))
        falling = time[order] - count[order] * (int(time.max()) + 1)  # each count starts afresh, below the one before
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = falling[1:] < np.minimum.accumulate(falling)[:-1]
        kept = order[keep]
        extended: Integers = used[rows[kept]]
        extended[:, index] = times[kept]
        return extended

    def _filled_up(self, used: Integers, cutoff: float) -> tuple[Integers | None, float]:
        """The best of these after the rest of the layers took the two basic strategies, if it beats the cutoff."""
        fast, slow = self.fast, self.slow
        rest = self.layers - used.sum(axis=1)
        room = self.budget - used @ self.memory
        short = rest * self.memory[fast] - room
        slower = np.clip(-(-short // (self.memory[fast] - self.memory[slow])), 0, rest)
        fits = rest * self.memory[fast] - slower * (self.memory[fast] - self.memory[slow]) <= room
        total = used @ self.time + (rest - slower) * self.time[fast] + slower * self.time[slow]
        total = np.where(fits, total.astype(np.float64), np.inf)
        at = int(total.argmin())
        if total[at] >= cutoff:
            return None, cutoff
        counts = used[at].copy()
        counts[fast] += rest[at] - slower[at]
        counts[slow] += slower[at]
        return counts, float(total[at])
