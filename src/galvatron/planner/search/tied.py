"""Stages in which layers share a tied weight: what they pay depends on how its owner splits it.

Without that price a stage is easier: its optimum is the true one where nobody has to split the weight anew. Else each
way in which the owner may split it is a stage of its own, with the owner held to that way and the price added to the
later users' tables; the best of those is the optimum. They are searched together, the most promising first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import numpy as np

from galvatron.planner.cost import NEVER, Integers, Resplit, StageCosts
from galvatron.planner.cost.arrays import Places
from galvatron.planner.search.stage import StageProblem, StageSolution, solve_any, solve_stage

__all__ = ["TiedWeights", "solve_roughly", "solve_tied"]


class TiedWeights:
    """How one combination shares tied weights."""

    def __init__(self, costs: StageCosts, micro_batch: int, strategies: Places) -> None:
        self.costs = costs
        self._micro_batch, self._strategies = micro_batch, strategies
        self.split_of: Integers = costs.split_of[:, strategies]
        """(T, S) how each kind's weights are split under the strategy of each candidate."""
        self._resplits: dict[int, Resplit] = {}

    def resplit(self, split: int) -> Resplit:
        """What later users pay where the owner splits the weight in the way of this number."""
        if split not in self._resplits:
            whole = self.costs.resplit(self._micro_batch, split)
            taken = {each.name: getattr(whole, each.name)[:, self._strategies] for each in fields(Resplit)}
            self._resplits[split] = Resplit(**taken)
        return self._resplits[split]

    def splits(self, kind: int) -> list[int]:
        """The ways in which a kind of layer can split a weight."""
        return sorted(set(self.split_of[kind].tolist()))


def solve_tied(
    problem: StageProblem, budget: int, cutoff: int, tied: TiedWeights, in_flight_count: int, sharing: Sequence[int]
) -> StageSolution | None:
    """The fastest assignment that fits, or None when none is faster than ``cutoff``.

    ``sharing``: the layers that share a tied weight, its owner first.
    """
    if len(sharing) < 2:
        return solve_stage(problem, budget, cutoff)

    def alike(solution: StageSolution) -> bool:
        splits = {int(tied.split_of[problem.kinds[place], solution.choice[place]]) for place in sharing}
        return len(splits) == 1

    rough = solve_any((problem,), budget, cutoff, rough=True)
    if rough is None or alike(rough):  # then the optimum probably is, too
        best = solve_stage(problem, budget, cutoff)
        if best is None or alike(best):
            return best
    return solve_any(tuple(_by_owner(problem, tied, in_flight_count, sharing)), budget, cutoff)


def solve_roughly(
    problem: StageProblem, budget: int, tied: TiedWeights, in_flight_count: int, sharing: Sequence[int]
) -> StageSolution | None:
    """An assignment that fits, found soon; there may be one where none is found."""
    shared = len(sharing) > 1
    return solve_any(
        tuple(_by_owner(problem, tied, in_flight_count, sharing)) if shared else (problem,), budget, rough=True
    )


def _by_owner(
    problem: StageProblem, tied: TiedWeights, in_flight_count: int, sharing: Sequence[int]
) -> Iterator[StageProblem]:
    """The stage for each way in which the owner may split the weight. Owner and users become kinds of their own."""
    owner, *users = sharing
    kinds = problem.kinds
    resplit = list(dict.fromkeys(kinds[users].tolist()))
    rows = [*range(len(problem.time)), int(kinds[owner]), *resplit]
    first = len(problem.time)
    named = kinds.copy()
    named[owner] = first
    named[users] = [first + 1 + resplit.index(kind) for kind in kinds[users].tolist()]
    for split in tied.splits(int(kinds[owner])):
        paid = tied.resplit(split)
        time, memory, transient = problem.time[rows], problem.memory[rows], problem.transient[rows]
        time[first] = np.where(tied.split_of[kinds[owner]] == split, time[first], NEVER)
        time[first + 1 :] += paid.time_ns[resplit]
        memory[first + 1 :] += in_flight_count * paid.activation_bytes[resplit]
        transient[first + 1 :] += paid.transient_bytes[resplit]
        yield replace(problem, kinds=named, time=time, memory=memory, transient=transient, change=problem.change[rows])
