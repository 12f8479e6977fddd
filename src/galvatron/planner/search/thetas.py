"""The tables of one stage, and the largest transients θ that are worth trying for it.

The peak of a stage holds one largest transient. A θ turns the problem into one without transients: strategies that need
more are forbidden, and the budget is smaller by θ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron.planner.cost import Integers
from galvatron.planner.search.bounds import Floats, hull_multipliers
from galvatron.planner.search.choices import Choices
from galvatron.planner.search.watch import UNWATCHED, Watch

__all__ = ["StageProblem", "Thetas"]


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
    watch: Watch = UNWATCHED


@dataclass(frozen=True, slots=True)
class Thetas:
    """A problem, and its useful θ in increasing order, each with a bound that ignores layout changes."""

    problem: StageProblem
    budget: int
    kinds: dict[int, Choices]
    thetas: list[int]
    bounds: Floats

    @classmethod
    def of(cls, problem: StageProblem, budget: int) -> Thetas:
        kinds = {
            int(kind): Choices.of(problem.time[kind], problem.memory[kind], problem.transient[kind], problem.layout_of)
            for kind in dict.fromkeys(problem.kinds.tolist())
        }
        return cls(problem, budget, kinds, *_useful(problem, kinds, budget))


def _useful(problem: StageProblem, kinds: dict[int, Choices], budget: int) -> tuple[list[int], Floats]:
    """Useful θ and their bounds.

    Some layer needs just θ: what no layer needs so much for is found with a smaller θ and more budget.
    """
    if any(kind.time.size == 0 for kind in kinds.values()):
        return [], np.empty(0)
    smallest = max(int(kind.transient.min()) for kind in kinds.values())
    thetas = np.array(sorted({theta for kind in kinds.values() for theta in kind.transient.tolist()}))
    thetas = thetas[(thetas >= smallest) & (thetas <= budget)]
    rows = list(kinds)
    lams = hull_multipliers(problem.time[rows], problem.memory[rows])
    counts = {index: int(np.count_nonzero(problem.kinds == index)) for index in kinds}
    lightest = {index: int(kind.memory.min()) for index, kind in kinds.items()}
    room = budget - thetas - sum(counts[index] * lightest[index] for index in kinds)
    bounds = -lams[:, None] * room
    extra = np.zeros(thetas.size, dtype=np.int64)
    just = np.full(bounds.shape, np.inf)
    for index, kind in kinds.items():
        order = np.argsort(kind.transient, kind="stable")
        upto = np.searchsorted(kind.transient[order], thetas, side="right") - 1
        memory = kind.memory[order] - lightest[index]
        priced = kind.time[order] + lams[:, None] * memory
        least = np.minimum.accumulate(priced, axis=1)[:, upto]
        bounds += counts[index] * least
        needed, begins = np.unique(kind.transient[order], return_index=True)
        places = np.searchsorted(needed, thetas).clip(max=len(needed) - 1)
        exact = np.minimum.reduceat(priced, begins, axis=1)[:, places]
        np.minimum(just, np.where(needed[places] == thetas, exact - least, np.inf), out=just)
        extra += counts[index] * np.minimum.accumulate(memory)[upto]
    bounds += just
    fits = extra <= room
    return thetas[fits].tolist(), bounds.max(axis=0)[fits] if fits.any() else np.empty(0)
