"""One stage, exactly: a strategy for each layer, least time within a memory budget.

The problem is a shortest path with a budget (paper Equation 1): minimise Σ time + Σ layout changes subject to
Σ memory + max transient ≤ budget. The paper fills a table over quantised memory; here labels (partial assignments) are
extended layer by layer and dropped when another is no worse in time and memory, or when a Lagrangian bound on the rest
proves that they cannot beat the best solution known. What survives the last layer is optimal.

Works on plain integer tables; knows nothing of models, devices or strategies.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.cost import NEVER, Integers
from galvatron.search.bounds import Floats, hull_multipliers

__all__ = ["StageProblem", "StageSolution", "solve_stage"]

_FAN = np.array([0.0, 0.35, 0.6, 0.8, 0.92, 1.0, 1.1, 1.3, 1.8, 3.0])
"""Multiples of the best multiplier whose bounds are kept; several together are tighter than one."""
_BEAM = 12
_CLOSE = 1.002
"""A cutoff this close to the bound prunes as well as a solution from a beam would."""
_BOUND_SLACK = 0.5
"""Times are whole: a bound within half a unit of the cutoff cannot hide an improvement, only rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProblem:
    """Tables of one stage. T kinds of layer, S strategies, K layouts."""

    kinds: Integers
    """(L,) the kind of each layer."""
    time: Integers
    """(T, S), NEVER where a strategy is not allowed."""
    memory: Integers
    """(T, S) what stays allocated for the whole iteration."""
    transient: Integers
    """(T, S) what is needed on top while the layer runs; only the largest counts."""
    layout_of: Integers
    """(S,) layout of each strategy."""
    change: Integers
    """(T, K, K) time to change layout after a layer of each kind, from row to column."""
    entry: Integers
    """(K,) time to receive the stage's input in the first layer's layout."""
    exit: Integers
    """(K,) time to receive the gradient of the stage's output in the last layer's layout."""


@dataclass(frozen=True, slots=True)
class StageSolution:
    """An optimal assignment."""

    time: int
    choice: tuple[int, ...]
    """Strategy index of each layer."""


def solve_stage(problem: StageProblem, budget: int, cutoff: int = NEVER) -> StageSolution | None:
    """The fastest assignment that fits, or None when none is faster than ``cutoff``.

    The peak holds one largest transient θ. A θ turns the problem into one without transients: strategies that need more
    are forbidden, and the budget is smaller by θ. Which θ is best is settled by branch and bound over ranges of them: a
    range allows all that its largest θ allows, with the budget that its smallest θ leaves.
    """
    kinds = {int(kind): _sorted_kind(problem, int(kind)) for kind in np.unique(problem.kinds)}
    thetas, bounds = _transient_candidates(problem, kinds, budget)
    heap = [(float(bounds.min()), 0, len(thetas))] if len(thetas) else []
    best: StageSolution | None = None
    while heap:
        bound, first, last = heapq.heappop(heap)
        if bound >= cutoff - _BOUND_SLACK:
            break
        path = _PathSolver(problem, kinds, thetas[last - 1], budget - thetas[first])
        if last - first == 1:
            solution = path.solve(cutoff)
            if solution is not None:
                best, cutoff = solution, solution.time
            continue
        bound = max(bound, path.bound)
        middle = (first + last) // 2
        for low, high in ((first, middle), (middle, last)):
            heapq.heappush(heap, (max(bound, float(bounds[low:high].min())), low, high))
    return best


def _transient_candidates(problem: StageProblem, kinds: dict[int, _Kind], budget: int) -> tuple[list[int], Floats]:
    """Useful θ in increasing order, each with a bound that ignores layout changes."""
    if any(kind.time.size == 0 for kind in kinds.values()):
        return [], np.empty(0)
    smallest = max(int(kind.transient.min()) for kind in kinds.values())
    thetas = np.unique(np.concatenate([kind.transient for kind in kinds.values()]))
    thetas = thetas[(thetas >= smallest) & (thetas <= budget)]
    rows = list(kinds)
    lams = hull_multipliers(problem.time[rows], problem.memory[rows])
    bounds = -lams[:, None] * (budget - thetas)
    least_memory = np.zeros(thetas.size)
    for index, kind in kinds.items():
        count = int(np.count_nonzero(problem.kinds == index))
        order = np.argsort(kind.transient, kind="stable")
        upto = np.searchsorted(kind.transient[order], thetas, side="right") - 1
        priced = kind.time[order] + lams[:, None] * kind.memory[order]
        bounds += count * np.minimum.accumulate(priced, axis=1)[:, upto]
        least_memory += count * np.minimum.accumulate(kind.memory[order])[upto]
    fits = least_memory <= budget - thetas
    return thetas[fits].tolist(), bounds.max(axis=0)[fits] if fits.any() else np.empty(0)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Strategies of one kind of layer, sorted by layout, memory and time."""

    strategy: Integers
    time: Integers
    memory: Integers
    transient: Integers
    layout: Integers

    def useful(self, theta: int) -> _Useful:
        """Those allowed under θ, without what another of the same layout beats in both time and memory."""
        allowed = np.nonzero(self.transient <= theta)[0]
        layout, time = self.layout[allowed], self.time[allowed]
        falling = time - layout * (4 * NEVER)  # each layout starts afresh, below all of the one before
        keep = np.ones(len(allowed), dtype=bool)
        keep[1:] = falling[1:] < np.minimum.accumulate(falling)[:-1]
        chosen, layout = allowed[keep], layout[keep]
        first = np.concatenate([[0], np.nonzero(layout[1:] != layout[:-1])[0] + 1])
        count = np.diff(first, append=len(layout))
        return _Useful(self.strategy[chosen], self.time[chosen], self.memory[chosen], layout[first], first, count)


@dataclass(frozen=True, slots=True)
class _Useful:
    """Strategies worth choosing for one kind of layer."""

    strategy: Integers
    time: Integers
    memory: Integers
    layouts: Integers
    """Layouts present."""
    first: Integers
    """Index of each layout's first strategy."""
    count: Integers
    """Number of strategies of each layout."""


def _sorted_kind(problem: StageProblem, kind: int) -> _Kind:
    time, memory, transient = problem.time[kind], problem.memory[kind], problem.transient[kind]
    possible = np.nonzero(time < NEVER)[0]
    order = possible[np.lexsort((time[possible], memory[possible], problem.layout_of[possible]))]
    return _Kind(order, time[order], memory[order], transient[order], problem.layout_of[order])


class _PathSolver:
    """The problem without transients: Σ memory ≤ budget."""

    def __init__(self, problem: StageProblem, kinds: dict[int, _Kind], theta: int, budget: int) -> None:
        self.problem, self.budget = problem, budget
        self.kinds = {index: kind.useful(theta) for index, kind in kinds.items()}
        self.sequence = problem.kinds.tolist()
        self.layouts = problem.change.shape[1]
        self.lams = _FAN * self._best_multiplier()
        self.rest, self.bound = self._completion_bounds()

    def solve(self, cutoff: int) -> StageSolution | None:
        """Best solution faster than the cutoff: first a narrow beam for a good one, then all that could beat it."""
        if self.bound >= cutoff - _BOUND_SLACK:
            return None
        beam = self._extend(cutoff, width=_BEAM) if cutoff > self.bound * _CLOSE else None
        exact = self._extend(beam.time if beam else cutoff, width=None)
        return exact or beam

    def _best_multiplier(self) -> float:
        """Maximiser of the Lagrangian bound when layout changes are ignored."""
        counts = {kind: self.sequence.count(kind) for kind in self.kinds}

        def bound(lams: Floats) -> Floats:
            total: Floats = -lams * self.budget
            for kind, table in self.kinds.items():
                total += counts[kind] * (table.time + lams[:, None] * table.memory).min(axis=1)
            return total

        lams = np.unique(np.concatenate([hull_multipliers(t.time[None], t.memory[None]) for t in self.kinds.values()]))
        return float(lams[int(bound(lams).argmax())])

    def _completion_bounds(self) -> tuple[Floats, float]:
        """(L, J, K): least priced cost of all that follows a layer, for each multiplier and the layer's layout; and the
        bound on the whole path that they imply."""
        lams = self.lams[:, None]
        entering = {}
        for kind, table in self.kinds.items():
            priced = np.full((len(self.lams), self.layouts), np.inf)
            priced[:, table.layouts] = np.minimum.reduceat(table.time + lams * table.memory, table.first, axis=1)
            entering[kind] = priced
        rest = np.empty((len(self.sequence), len(self.lams), self.layouts))
        after = np.tile(self.problem.exit.astype(np.float64), (len(self.lams), 1))
        for layer in range(len(self.sequence) - 1, 0, -1):
            rest[layer] = after
            through = (after + entering[self.sequence[layer]])[:, None, :]
            after = (through + self.problem.change[self.sequence[layer - 1]]).min(axis=2)
        rest[0] = after
        whole = (after + entering[self.sequence[0]] + self.problem.entry).min(axis=1) - self.lams * self.budget
        return rest, float(whole.max())

    def _extend(self, cutoff: int, width: int | None) -> StageSolution | None:
        """Labels layer by layer; with a width only the most promising go on, without one the result is exact."""
        lams = self.lams[:, None]
        least = np.array([self.kinds[kind].memory.min() for kind in self.sequence])
        least_after = np.append(np.cumsum(least[::-1])[::-1][1:], 0)
        history: list[tuple[NDArray[np.intp], Integers]] = []
        time = memory = layout = np.empty(0, dtype=np.int64)
        for layer, kind in enumerate(self.sequence):
            table = self.kinds[kind]
            if layer == 0:
                base = np.arange(len(table.strategy))
                parent = np.zeros(len(table.strategy), dtype=np.intp)
                new_layout = np.repeat(table.layouts, table.count)
                new_time, new_memory = table.time + self.problem.entry[new_layout], table.memory
            else:
                arriving = self.problem.change[self.sequence[layer - 1]][layout][:, table.layouts].T + time
                target, parent = np.nonzero(_strict_minima(arriving))
                repeats = table.count[target]
                rows = np.repeat(np.arange(len(target)), repeats)
                base = np.arange(len(rows)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
                base += table.first[target][rows]
                new_layout = table.layouts[target][rows]
                new_time = arriving[target, parent][rows] + table.time[base]
                parent = parent[rows]
                new_memory = memory[parent] + table.memory[base]
            bound = new_time + (self.rest[layer][:, new_layout] + lams * (new_memory - self.budget)).max(axis=0)
            alive = (bound < cutoff - _BOUND_SLACK) & (new_memory <= self.budget - least_after[layer])
            chosen = np.nonzero(alive)[0]
            if width is not None and chosen.size > width:
                chosen = chosen[np.argsort(bound[chosen], kind="stable")[:width]]
            if chosen.size == 0:
                return None
            chosen = chosen[np.lexsort((new_time[chosen], new_memory[chosen]))]
            time, memory, layout = new_time[chosen], new_memory[chosen], new_layout[chosen]
            history.append((parent[chosen], table.strategy[base[chosen]]))
        total = time + self.problem.exit[layout]
        index = int(total.argmin())
        choice = []
        best = int(total[index])
        for parents, strategies in reversed(history):
            choice.append(int(strategies[index]))
            index = int(parents[index])
        return StageSolution(best, tuple(reversed(choice)))


def _strict_minima(rows: Integers) -> NDArray[np.bool_]:
    """Where each row (sorted by memory) goes below all before it: labels not dominated on their way to a layout."""
    keep = np.ones(rows.shape, dtype=bool)
    np.less(rows[:, 1:], np.minimum.accumulate(rows, axis=1)[:, :-1], out=keep[:, 1:])
    return keep
