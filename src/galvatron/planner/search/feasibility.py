"""What fits at all, whatever time it takes: the smallest budget, and the smallest batch that can be divided.

Each combination gets a cheap lower bound on its memory; only one that may need less than the best so far is looked at.
"""

from __future__ import annotations

import numpy as np

from galvatron.planner.cost import NEVER
from galvatron.planner.search.least_memory import LeastMemory
from galvatron.planner.search.outer import Search
from galvatron.planner.search.problem import Problem

__all__ = ["Feasibility", "least_budget"]


def least_budget(problem: Problem) -> int | None:
    """The smallest budget in which some plan fits; None: nothing can be divided that way, whatever the budget."""
    return Feasibility(problem).least_budget(*problem.batches)


class Feasibility:
    """Answers for one model, cluster and space; the batches of the problem do not matter."""

    def __init__(self, problem: Problem) -> None:
        self._search = Search(problem)

    def can_divide(self, batch: int) -> bool:
        """Whether some strategy can divide the batch, given enough memory."""
        return any(
            self._search.candidates_of(degree).costs.possible(np.array(batch // count)).any(axis=-1).all()
            for degree in self._search.degrees
            for count in self._search.micro_batch_counts(batch, degree)
        )

    def fits(self, batch: int) -> bool:
        """Whether some plan for this batch fits the problem's budget."""
        return self._least((batch,), enough=self._search.problem.budget) is not None

    def least_budget(self, *batches: int) -> int | None:
        """The smallest budget in which some plan for one of these batches fits."""
        return self._least(batches, enough=None)

    def _least(self, batches: tuple[int, ...], enough: int | None) -> int | None:
        """``enough``: a budget that is good enough; nothing above it counts, and below it nothing better is looked
        for."""
        best = NEVER if enough is None else enough + 1
        if self._search.problem.floor >= best:
            return None
        found = None
        for degree in self._search.degrees:
            pairs = [(batch, count) for batch in batches for count in self._search.micro_batch_counts(batch, degree)]
            bounds = sorted(zip(self._search.memory_bounds(degree, pairs), pairs, strict=True))
            for bound, (batch, count) in bounds:
                if bound >= best:
                    break
                needs = LeastMemory(self._search.combination(batch, degree, count))
                least = needs.peak_within(best - 1) if enough is not None else needs.least(bound, best)
                if least is not None:
                    best = found = least
                if found is not None and enough is not None:
                    return found
        return found
