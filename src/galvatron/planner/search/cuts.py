"""Where to cut the layers into pipeline stages: exact, for a fixed batch, micro-batch count and pipeline degree.

An iteration takes Σ stages + (m − 1)·max stage, or another such ``Pace`` (``galvatron.planner.cost``). A dynamic
program over cut positions runs on lower bounds of the stage times; the stages of its optimum are then solved exactly
and their true times put in place of the bounds, until the optimum consists of true times only. Integers in float64,
exact below 2⁵³.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from galvatron.planner.cost import Pace
from galvatron.planner.search.bounds import Floats

__all__ = ["CutMatrix", "CutRule", "Cuts", "balanced_cuts", "best_cuts", "cuts_bound"]


class CutRule(StrEnum):
    """How the layers are divided into stages: searched exactly, or by one of the paper's guidelines (Section 3.3)."""

    EXACT = "exact"
    LAYERS = "layers"
    PARAMETERS = "parameters"
    MEMORY = "memory"
    TIME = "time"


CutMatrix = Floats
"""(L+1, W+1): time of a stage that ends before layer j and has w layers, at [j, w]; inf where there is none."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Stage p holds the layers from positions[p] to positions[p + 1]."""

    objective: float
    positions: tuple[int, ...]


def best_cuts(matrices: list[CutMatrix], pace: Pace, cutoff: float) -> Cuts | None:
    """Cut positions of the fastest iteration, or None when nothing stays below the cutoff.

    The sum alone is easy (a path); so the slowest stage is bounded from above, and the bound lowered to just below
    what the last path had, as long as a better compromise is possible.
    """
    program = _Program(matrices)
    path = program.shortest(np.inf)
    if path is None:
        return None
    least_sum, slowest, positions = path
    best, best_positions = pace.whole_ns(least_sum, slowest), positions
    if pace.slowest:
        least_slowest = program.least_slowest(slowest)
        if pace.whole_ns(least_sum, least_slowest) >= min(best, cutoff):
            return Cuts(best, best_positions) if best < cutoff else None
        even = program.shortest(least_slowest)  # the other extreme; often best, and then little is left to try
        if even is not None and pace.whole_ns(even[0], even[1]) < best:
            best, best_positions = pace.whole_ns(even[0], even[1]), even[2]
        while True:
            limit = min(np.nextafter(slowest, 0), (min(best, cutoff) - pace.total * least_sum) / pace.slowest)
            if limit < least_slowest:
                break
            path = program.shortest(limit)
            if path is None:
                break
            least_sum, slowest, positions = path
            if pace.whole_ns(least_sum, slowest) < best:
                best, best_positions = pace.whole_ns(least_sum, slowest), positions
    return Cuts(best, best_positions) if best < cutoff else None


def cuts_bound(matrices: list[CutMatrix], pace: Pace) -> float:
    """A cheap lower bound on what :func:`best_cuts` finds: the least sum and the least slowest stage, each alone."""
    program = _Program(matrices)
    path = program.shortest(np.inf)
    return np.inf if path is None else pace.whole_ns(path[0], program.least_slowest(path[1]))


class _Program:
    """Paths through cut positions.

    Where no stage has more than ``widest`` layers, stage p can only end within a band: not beyond what p + 1 stages
    can take, and not so early that the stages after it could not take the rest. Nothing else is looked at.
    """

    def __init__(self, matrices: list[CutMatrix]) -> None:
        self.matrices = matrices
        self.layers = matrices[0].shape[0] - 1
        distinct = {id(matrix): matrix for matrix in matrices}.values()
        self.least_of_width: Floats = np.min([matrix.min(axis=0) for matrix in distinct], axis=0)

    def shortest(self, limit: float) -> tuple[float, float, tuple[int, ...]] | None:
        """(sum, slowest, positions) of the least sum with every stage within the limit."""
        widths: list[tuple[int, NDArray[np.intp]]] = []
        reach = self._start()
        for first, last, before, times in self._steps(limit, reach):
            if limit < np.inf:
                times = np.where(times <= limit, times, np.inf)
            total = before + times
            width = total.argmin(axis=1)
            widths.append((first, width))
            self._reached(reach, first, last, total[np.arange(last - first + 1), width])
        if not widths or not np.isfinite(reach[-1]):
            return None
        positions = [self.layers]
        for first, width in reversed(widths):
            positions.append(positions[-1] - int(width[positions[-1] - first]))
        positions.reverse()
        slowest = max(
            matrix[end, end - begin]
            for matrix, begin, end in zip(self.matrices, positions, positions[1:], strict=False)
        )
        return float(reach[-1]), float(slowest), tuple(positions)

    def least_slowest(self, at_most: float) -> float:
        """The least possible time of the slowest stage, where some path is known to have no slower one than this."""
        reach = self._start()
        for first, last, before, times in self._steps(at_most, reach):
            self._reached(reach, first, last, np.maximum(before, times).min(axis=1))
        return float(reach[-1])

    def _start(self) -> Floats:
        """What stages so far take at least, by where they end; before the first position there is nothing."""
        reach = np.full(len(self.least_of_width) + self.layers, np.inf)
        reach[-self.layers - 1] = 0.0
        return reach

    def _reached(self, reach: Floats, first: int, last: int, times: Floats) -> None:
        reach[:] = np.inf
        reach[len(reach) - 1 - self.layers + first : len(reach) - self.layers + last] = times

    def _steps(self, limit: float, reach: Floats) -> Iterator[tuple[int, int, Floats, Floats]]:
        """Stage by stage: first and last position where it may end; and by end and width what the stages before it
        take, as far as it is known by then, and what it takes itself."""
        within = np.nonzero(self.least_of_width <= limit)[0]
        widest = int(within[-1]) if within.size else 0
        stages, begins = len(self.matrices), len(reach) - 1 - self.layers
        if stages * widest < self.layers or stages > self.layers:
            return
        ending = sliding_window_view(reach, widest + 1)[:, ::-1]
        for stage, matrix in enumerate(self.matrices):
            after = stages - stage - 1
            first = max(stage + 1, self.layers - after * widest)
            last = min((stage + 1) * widest, self.layers - after)
            before = ending[begins + first - widest : begins + last - widest + 1]
            yield first, last, before, matrix[first : last + 1, : widest + 1]


def balanced_cuts(weights: Floats, stages: int) -> tuple[int, ...]:
    """Cut positions that minimise the heaviest stage: the paper's guidelines (Section 3.3), by layers, parameters,
    memory or time, depending on what the weights are."""
    layers = len(weights)
    prefix = np.concatenate([[0.0], np.cumsum(weights)])
    matrix = np.full((layers + 1, layers + 1), np.inf)
    for end in range(1, layers + 1):
        matrix[end, 1 : end + 1] = prefix[end] - prefix[end - 1 :: -1][:end]
    program = _Program([matrix] * stages)
    # Within the least heaviest stage, make squares small so that the others are even too.
    limit = program.least_slowest(np.inf) * (1 + 1e-12)
    even = _Program([np.where(matrix <= limit, matrix * matrix, np.inf)] * stages)
    path = even.shortest(np.inf)
    assert path is not None
    return path[2]
