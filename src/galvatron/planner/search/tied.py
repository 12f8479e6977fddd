"""Stages in which layers share a tied weight: what they pay depends on how its owner splits it.

Without that price a stage is easier: its optimum is a lower bound, and the true optimum where nobody has to split the
weight anew. Else each way in which the owner may split it is a stage of its own, with the owner held to that way and
the price added to the later users' tables; the best of those is the optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import numpy as np

from galvatron.planner.cost import NEVER, Integers, Resplit, StageCosts, Tables
from galvatron.planner.cost.arrays import Places
from galvatron.planner.search.cuts import CutMatrix
from galvatron.planner.search.stage import StageProblem, StageSolution, solve_stage

__all__ = ["TiedWeights", "raise_least_peaks", "solve_tied"]


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
    best = solve_stage(problem, budget, cutoff)
    if best is None or len(sharing) < 2:
        return best
    split_of = tied.split_of
    if len({int(split_of[problem.kinds[place], best.choice[place]]) for place in sharing}) == 1:
        return best
    least, best = best.time, None
    for stage in _by_owner(problem, tied, in_flight_count, sharing):
        found = solve_stage(stage, budget, cutoff)
        if found is not None:
            best, cutoff = found, found.time
        if cutoff == least:
            break
    return best


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


def raise_least_peaks(
    peaks: CutMatrix, kinds: Integers, tables: Tables, tied: TiedWeights, in_flight_count: int
) -> None:
    """Put the least memory of stages that share a weight in place of what they would need without splitting it anew.

    A stage's owner is the first of its layers that share the weight, so stages are taken by owner.
    """
    sharing = tied.costs.tied_places(kinds.tolist(), first=True)
    ends = np.arange(len(kinds) + 1)
    for before, owner, user in zip([-1, *sharing], sharing, sharing[1:], strict=False):
        begins = np.arange(before + 1, owner + 1)[:, None]
        lasts = ends[None, user + 1 :]
        inside = lasts - begins < peaks.shape[1]
        if not inside.any():
            continue
        least = np.full(inside.shape, np.inf)
        for split in tied.splits(int(kinds[owner])):
            for theta, up_to, of_owner, after in _least_sums(kinds, owner, tables, tied, split, in_flight_count):
                needed = up_to[owner] - up_to[begins] + of_owner + after[lasts] - after[owner + 1] + theta
                np.minimum(least, needed, out=least)
        at, where = np.broadcast_arrays(lasts, lasts - begins)
        peaks[at[inside], where[inside]] = least[inside]


def _least_sums(
    kinds: Integers, owner: int, tables: Tables, tied: TiedWeights, split: int, in_flight_count: int
) -> Iterator[tuple[int, Integers, int, Integers]]:
    """For each largest transient θ: sums of the least memory up to each layer, plain and as later users, and between
    them that of the owner."""
    usable = tables.time_ns < NEVER
    paid = tied.resplit(split)
    plain = tables.state_bytes + in_flight_count * tables.activation_bytes
    tied_places = plain + in_flight_count * paid.activation_bytes
    transient = np.where(usable, tables.transient_bytes, NEVER)
    late = np.where(usable, tables.transient_bytes + paid.transient_bytes, NEVER)
    held = transient[kinds[owner]], plain[kinds[owner]], tied.split_of[kinds[owner]] == split
    for theta in sorted({*transient[usable].tolist(), *late[usable].tolist()}):
        up_to = np.where(transient <= theta, plain, NEVER).min(axis=1)[kinds].cumsum()
        after = np.where(late <= theta, tied_places, NEVER).min(axis=1)[kinds].cumsum()
        of_owner = int(np.where((held[0] <= theta) & held[2], held[1], NEVER).min())
        yield theta, np.append(0, up_to), of_owner, np.append(0, after)
