"""One stage, exactly: a strategy for each layer, least time within a memory budget.

The problem is a shortest path with a budget (paper Equation 1): minimise Σ time + Σ layout changes subject to
Σ memory + max transient ≤ budget. The paper fills a table over quantised memory; here labels (partial assignments) are
extended layer by layer and dropped when another is no worse in time and memory, or when a Lagrangian bound on the rest
proves that they cannot beat the best solution known. What survives the last layer is optimal.

Works on plain integer tables; knows nothing of models, devices or strategies.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.planner.cost import NEVER, Integers
from galvatron.planner.search.bounds import Floats, hull_multipliers
from galvatron.planner.search.choices import Choices, Useful
from galvatron.planner.search.completions import Completions
from galvatron.planner.search.fill import Filling, fill, quick_fill
from galvatron.planner.search.labels import STAND_IN, Filler, Labels
from galvatron.planner.search.thetas import StageProblem, Thetas

__all__ = ["StageProblem", "StageSolution", "solve_any", "solve_stage"]

_FAN = np.array([0.0, 0.35, 0.6, 0.8, 0.92, 1.0, 1.1, 1.3, 1.8, 3.0])
"""Multiples of the best multiplier whose bounds are kept; several together are tighter than one."""
_MANY = 24
"""Equal layers from which on their choice is put off to the end."""
_BEAMS = (12, 200)
"""Widths of the beams that look for a good solution before all labels are kept."""
_MANY_LABELS = 400
"""From so many on it pays to look at the layers still to come in whole strategies."""
_BOUND_SLACK = 0.5
"""Times are whole: a bound within half a unit of the cutoff cannot hide an improvement, only rounding."""


@dataclass(frozen=True, slots=True)
class StageSolution:
    """An optimal assignment."""

    time: int
    choice: tuple[int, ...]
    """Strategy index of each layer."""


def solve_stage(problem: StageProblem, budget: int, cutoff: int = NEVER) -> StageSolution | None:
    """The fastest assignment that fits, or None when none is faster than ``cutoff``."""
    return solve_any((problem,), budget, cutoff)


def solve_any(
    problems: Sequence[StageProblem], budget: int, cutoff: int = NEVER, *, rough: bool = False
) -> StageSolution | None:
    """The fastest assignment for any of these problems that fits, or None when none is faster than ``cutoff``.

    The peak holds one largest transient θ. A θ turns the problem into one without transients: strategies that need more
    are forbidden, and the budget is smaller by θ. Which θ is best is settled by branch and bound over ranges of them: a
    range allows all that its largest θ allows, with the budget that its smallest θ leaves. Narrow beams look at every θ
    first, so that a good solution is known before all labels of any θ are kept.

    ``rough``: what beams find for the most promising θ is enough; there may be a solution where they find none.
    """
    roots = [Thetas.of(problem, budget) for problem in problems]
    heap = [(float(root.bounds.min()), place, 0, len(root.thetas)) for place, root in enumerate(roots) if root.thetas]
    heapq.heapify(heap)
    best: StageSolution | None = None
    unfinished: list[tuple[float, int, int, _PathSolver]] = []
    while heap:
        problems[0].watch.check()
        bound, place, first, last = heapq.heappop(heap)
        if bound >= cutoff - _BOUND_SLACK:
            break
        path = _PathSolver.of(roots[place], first, last)
        if last - first == 1:
            solution, complete = path.solve(cutoff)
            if solution is not None:
                best, cutoff = solution, solution.time
            if rough:
                return best
            if not complete:
                unfinished.append((path.bound, place, first, path))
            continue
        bound = max(bound, path.bound)
        middle = (first + last) // 2
        for low, high in ((first, middle), (middle, last)):
            least = float(roots[place].bounds[low:high].min())
            heapq.heappush(heap, (max(bound, least), place, low, high))
    for _, _, _, path in sorted(unfinished, key=lambda each: each[:3]):
        solution = path.solve_fully(cutoff)
        if solution is not None:
            best, cutoff = solution, solution.time
    return best


class _PathSolver:
    """The problem without transients: Σ memory ≤ budget."""

    def __init__(self, problem: StageProblem, kinds: dict[int, Choices], theta: int, budget: int) -> None:
        self.problem = problem
        self.sequence = problem.kinds.tolist()
        tables = {index: kind.useful(theta) for index, kind in kinds.items()}
        least = {index: int(table.memory.min()) for index, table in tables.items()}
        # What every choice of a layer needs is taken off both sides, so that prices times bytes stay accurate.
        self.kinds = {index: table.lighter(least[index]) for index, table in tables.items()}
        self.budget = budget - sum(least[kind] for kind in self.sequence)
        self.layouts = problem.change.shape[1]
        self.lams = _FAN * self._best_multiplier()
        self.rest, self.bounds = self._completion_bounds()
        self.best_first: NDArray[np.intp] = np.argsort(-self.bounds, kind="stable")
        """The multipliers, that with the best bound on the whole first."""
        self.deferred = self._deferred_class()

    @classmethod
    def of(cls, root: Thetas, first: int, last: int) -> _PathSolver:
        """All that some θ of this range allows, and perhaps more."""
        return cls(root.problem, root.kinds, root.thetas[last - 1], root.budget - root.thetas[first])

    @property
    def bound(self) -> float:
        """No assignment takes less."""
        return float(self.bounds.max())

    def solve(self, cutoff: int) -> tuple[StageSolution | None, bool]:
        """A good solution faster than the cutoff, found by narrow beams; and whether there is no better one."""
        best = None
        for width in _BEAMS:
            if self.bound >= cutoff - _BOUND_SLACK:
                return best, True
            found, complete = self._extend(cutoff, width)
            if found is not None:
                best, cutoff = found, found.time
            if complete:
                return best, True
        return best, False

    def solve_fully(self, cutoff: int) -> StageSolution | None:
        """The best solution faster than the cutoff."""
        if self.bound >= cutoff - _BOUND_SLACK:
            return None
        return self._extend(cutoff, None)[0]

    def _promising(self, cutoff: int) -> dict[int, Useful]:
        """Strategies that may be part of a solution below the cutoff.

        Forcing a strategy on a layer raises the bound by at least what it costs more, at a multiplier's prices, than
        the best strategy of the same layout.
        """
        promising = {}
        for kind, table in self.kinds.items():
            cost, least = table.priced(self.lams)
            forced = self.bounds[:, None] + cost - np.repeat(least, table.count, axis=1)
            promising[kind] = table.kept(forced.max(axis=0) < cutoff - _BOUND_SLACK)
        return promising

    def _best_multiplier(self) -> float:
        """Maximiser of the Lagrangian bound when layout changes are ignored."""
        counts = {kind: self.sequence.count(kind) for kind in self.kinds}

        def bound(lams: Floats) -> Floats:
            total: Floats = -lams * self.budget
            for kind, table in self.kinds.items():
                total += counts[kind] * (table.time + lams[:, None] * table.memory).min(axis=1)
            return total

        lams = np.concatenate([hull_multipliers(table.time[None], table.memory[None]) for table in self.kinds.values()])
        return float(lams[int(bound(lams).argmax())])

    def _completion_bounds(self) -> tuple[Floats, Floats]:
        """(L, J, K): least priced cost of all that follows a layer, for each multiplier and each layout that the layer
        can have; and (J,) the bounds on the whole path that they imply."""
        entering = {kind: table.priced(self.lams)[1] for kind, table in self.kinds.items()}
        rest = np.full((len(self.sequence), len(self.lams), self.layouts), np.inf)
        rest[-1] = self.problem.exit
        steps: dict[tuple[int, int], Integers] = {}
        for layer in range(len(self.sequence) - 1, 0, -1):
            before, here = self.sequence[layer - 1], self.sequence[layer]
            sources, targets = self.kinds[before].layouts, self.kinds[here].layouts
            if (before, here) not in steps:
                steps[before, here] = self.problem.change[before][np.ix_(sources, targets)]
            through = (rest[layer][:, targets] + entering[here])[:, None, :]
            rest[layer - 1][:, sources] = (through + steps[before, here]).min(axis=2)
        first = self.kinds[self.sequence[0]].layouts
        whole = rest[0][:, first] + entering[self.sequence[0]] + self.problem.entry[first]
        return rest, whole.min(axis=1) - self.lams * self.budget

    def _deferred_class(self) -> tuple[int, int] | None:
        """(kind, layout) of the layers whose choice is put off, where one kind makes up a long stage.

        Equal layers of one layout are exchangeable: choosing among them layer by layer would tell apart every order of
        the same choices. Labels only count such layers, and ``search.fill`` chooses at the end.
        """
        kind, count = max(((kind, self.sequence.count(kind)) for kind in self.kinds), key=lambda item: item[1])
        if count < _MANY:
            return None
        least = self.kinds[kind].priced(self.lams[_FAN == 1.0])[1][0]
        return kind, int(self.kinds[kind].layouts[int(least.argmin())])

    def _extend(self, cutoff: int, width: int | None) -> tuple[StageSolution | None, bool]:
        """Labels layer by layer, at most ``width`` of them; and whether none had to be left out."""
        complete = True
        kinds = self._promising(cutoff)
        if any(table.time.size == 0 for table in kinds.values()):
            return None, complete
        least = np.array([kinds[kind].memory.min() for kind in self.sequence])
        least_after = np.append(np.cumsum(least[::-1])[::-1][1:], 0)
        completions = self._completions(kinds, cutoff)
        filler = self._put_off(kinds)
        labels = Labels.start(self.problem.entry)
        history: list[tuple[NDArray[np.intp], Integers]] = []
        for layer, kind in enumerate(self.sequence):
            self.problem.watch.check()
            change = self.problem.change[self.sequence[layer - 1]] if layer else None
            grown, parent, base = labels.extended(kinds[kind], change)
            needed = grown.memory + grown.put_off * filler.least_memory
            chosen = np.nonzero(needed <= self.budget - least_after[layer])[0]
            chosen, bound = self._hopeful(grown, chosen, filler, self.rest[layer], cutoff)
            if width is None and chosen.size > _MANY_LABELS:
                left = grown.at(chosen)
                chosen = chosen[left.time + completions.least_time(layer, left) < cutoff]
            elif width is not None and chosen.size > width:
                chosen = chosen[np.argsort(bound, kind="stable")[:width]]
                complete = False
            if chosen.size == 0:
                return None, complete
            chosen = chosen[np.lexsort((grown.time[chosen], grown.memory[chosen], grown.put_off[chosen]))]
            labels = grown.at(chosen)
            history.append((parent[chosen], kinds[kind].strategy[base[chosen]]))
        return self._finished(labels, filler, history, cutoff), complete

    def _completions(self, kinds: dict[int, Useful], cutoff: int) -> Completions:
        deferred = None if self.deferred is None else self.deferred[0]
        lam = float(self.lams[_FAN == 1.0][0])
        return Completions(dict(kinds), self.sequence, deferred, lam, self.budget).below(cutoff)

    def _put_off(self, kinds: dict[int, Useful]) -> Filler:
        """Replace the strategies of the deferred class, if there is one, by a stand-in that costs nothing yet."""
        if self.deferred is None:
            return Filler.none(self.lams)
        kind, layout = self.deferred
        table = kinds[kind]
        here = table.layout == layout
        if not here.any():
            return Filler.none(self.lams)
        first = int(here.argmax())
        stand_in = np.arange(len(here)) == first
        kinds[kind] = Useful(
            np.where(stand_in, STAND_IN, table.strategy),
            np.where(stand_in, 0, table.time),
            np.where(stand_in, 0, table.memory),
            table.layout,
        ).kept(~here | stand_in)
        return Filler.of(table.kept(here), self.lams)

    def _hopeful(
        self, labels: Labels, chosen: NDArray[np.intp], filler: Filler, rest: Floats, cutoff: int
    ) -> tuple[NDArray[np.intp], Floats]:
        """Those of the chosen labels that may still beat the cutoff, with what each takes at least: what it has, layers
        put off, layers to come, less the budget's worth.

        The multiplier with the best bound on the whole comes first; the others look at what it leaves. Few labels are
        looked at with all of them at once.
        """
        order = self.best_first
        bound = np.full(chosen.size, -np.inf)
        for places in (order,) if chosen.size < _MANY_LABELS else (order[:1], order[1:]):
            put_off, memory, layout = labels.put_off[chosen], labels.memory[chosen], labels.layout[chosen]
            open_cost = filler.priced[places, None] * put_off + self.lams[places, None] * (memory - self.budget)
            open_cost = open_cost + rest[places][:, layout]
            np.maximum(bound, labels.time[chosen] + open_cost.max(axis=0), out=bound)
            keep = bound < cutoff - _BOUND_SLACK
            chosen, bound = chosen[keep], bound[keep]
        return chosen, bound

    def _least_filled(self, labels: Labels, filler: Filler, cutoff: int) -> tuple[Floats, int]:
        """What these labels take at least after their layers put off are filled in; and a cutoff that leaves the best
        of them, as low as some quick filling makes it."""
        total = labels.time + self.problem.exit[labels.layout]
        if not labels.put_off.any():
            return total.astype(np.float64), cutoff
        table, room = filler.table, self.budget - labels.memory
        quick = total + quick_fill(table.time, table.memory, labels.put_off, room)
        cutoff = int(min(cutoff, quick.min() + 1))
        place = int(self.best_first[0])
        lam, priced = float(self.lams[place]), float(filler.priced[place])
        least = total + priced * labels.put_off - lam * room
        equal = Completions({0: table}, [], 0, lam, self.budget).within(cutoff - float(least.min()))
        return (total + equal.of_equal(labels.put_off, room)).astype(np.float64), cutoff

    def _finished(
        self, labels: Labels, filler: Filler, history: list[tuple[NDArray[np.intp], Integers]], cutoff: int
    ) -> StageSolution | None:
        """The best complete label after its layers put off are filled in."""
        total = labels.time + self.problem.exit[labels.layout]
        left, bounds = self._hopeful(labels, np.arange(len(total)), filler, self.rest[-1], cutoff)
        least, cutoff = self._least_filled(labels.at(left), filler, cutoff)
        order = np.argsort(bounds, kind="stable")
        best: tuple[int, Filling] | None = None
        for index, bound, filled in zip(*(each[order].tolist() for each in (left, bounds, least)), strict=True):
            if bound >= cutoff - _BOUND_SLACK:
                break
            if filled >= cutoff - _BOUND_SLACK:
                continue
            put_off, room = int(labels.put_off[index]), self.budget - int(labels.memory[index])
            filling = fill(filler.table.time, filler.table.memory, put_off, room, cutoff - int(total[index]))
            if filling is not None:
                best, cutoff = (index, filling), int(total[index]) + filling.time
        if best is None:
            return None
        index, filling = best
        late = [int(s) for s, n in zip(filler.table.strategy, filling.counts, strict=True) for _ in range(n)]
        choice = []
        for parents, strategies in reversed(history):
            chosen = int(strategies[index])
            choice.append(late.pop() if chosen == STAND_IN else chosen)
            index = int(parents[index])
        return StageSolution(cutoff, tuple(reversed(choice)))
