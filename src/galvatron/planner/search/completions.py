"""What a label lacks, exactly but for layout changes: least time of the layers still to be chosen, by memory left.

Lagrangian bounds price memory by the byte. But layers take it in large steps, and what is left over at the end buys
nothing: with a tight budget that is most of the gap between bound and optimum, and every label within the gap is kept.
Here sums over the layers are made in whole strategies, of any layout. Each set of layers has a *front*: the sums that
no other beats in both memory and time. Sums that a Lagrangian bound already proves to be too slow are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from galvatron.planner.cost import NEVER, Integers
from galvatron.planner.search.choices import Useful
from galvatron.planner.search.labels import Labels

__all__ = ["Completions"]

_MOST = 1024
"""Points of a front; where there are more, neighbours share the memory of one and the time of the other."""
_ROUNDING = 1.0
"""Nanoseconds that reduced costs may be wrong by."""


@dataclass(frozen=True, slots=True)
class _Front:
    """Sums over some layers, by growing memory and falling time."""

    memory: Integers
    time: Integers
    layers: int
    least_priced: float
    """Least time + λ·memory of the layers, each by itself."""

    def least(self, room: Integers) -> Integers:
        """Least time within so many bytes; NEVER where nothing fits."""
        return np.append(NEVER, self.time)[np.searchsorted(self.memory, room, side="right")]


class Completions:
    """Fronts of the layers that follow a layer, together with layers put off."""

    def __init__(
        self, kinds: Mapping[int, Useful], sequence: Sequence[int], deferred: int | None, lam: float, budget: int
    ) -> None:
        """``kinds``: the strategies of each kind that may be used; ``deferred``: the kind whose layers may be put off;
        ``lam``: the multiplier at which sums are compared with the cutoff."""
        self._lam, self._budget = lam, budget
        self._sequence, self._deferred = sequence, deferred
        self._options = {kind: self._front_of(table) for kind, table in kinds.items()}
        self._least = sum(self._options[kind].least_priced for kind in sequence) - lam * budget
        self._slack = np.inf
        self._equal, self._others = [_nothing()], [_nothing()]
        self._joined: dict[tuple[int, int], _Front] = {}

    def below(self, cutoff: int) -> Completions:
        """From now on sums that cannot be part of a solution below the cutoff are left out."""
        return self.within(cutoff - self._least)

    def within(self, slack: float) -> Completions:
        """From now on sums are left out that cost more than so much, at the multiplier's prices, above the least."""
        self._slack = slack + _ROUNDING
        return self

    def least_time(self, layer: int, labels: Labels) -> Integers:
        """Of all layers after this one and of those put off, for each label."""
        after = self._sequence[layer + 1 :]
        equal = after.count(self._deferred) if self._deferred is not None else 0
        return self._least_times(len(after) - equal, equal + labels.put_off, self._budget - labels.memory)

    def of_equal(self, counts: Integers, room: Integers) -> Integers:
        """Least time of so many layers of the kind put off, each within so many bytes."""
        return self._least_times(0, counts, room)

    def _least_times(self, others: int, equal: Integers, room: Integers) -> Integers:
        times = np.empty(len(equal), dtype=np.int64)
        for count in np.unique(equal).tolist():
            here = equal == count
            times[here] = self._front(others, count).least(room[here])
        return times

    def _front(self, others: int, equal: int) -> _Front:
        """Of the last so many layers of other kinds, and of so many of the kind put off."""
        if (others, equal) not in self._joined:
            while len(self._equal) <= equal:
                assert self._deferred is not None
                self._equal.append(self._sum(self._equal[-1], self._options[self._deferred]))
            rest = [kind for kind in self._sequence if kind != self._deferred]
            while len(self._others) <= others:
                kind = rest[-len(self._others)]
                self._others.append(self._sum(self._others[-1], self._options[kind]))
            self._joined[others, equal] = self._sum(self._equal[equal], self._others[others])
        return self._joined[others, equal]

    def _front_of(self, table: Useful) -> _Front:
        memory, time = _thinned(table.memory, table.time)
        return _Front(memory, time, 1, float((time + self._lam * memory).min()))

    def _sum(self, one: _Front, other: _Front) -> _Front:
        memory = (one.memory[:, None] + other.memory).ravel()
        time = (one.time[:, None] + other.time).ravel()
        least = one.least_priced + other.least_priced
        keep = (time + self._lam * memory - least < self._slack) & (memory <= self._budget)
        memory, time = _thinned(memory[keep], time[keep])
        if len(memory) > _MOST:
            groups = np.linspace(0, len(memory), _MOST + 1).astype(np.intp)
            memory, time = memory[groups[:-1]], time[groups[1:] - 1]
        return _Front(memory, time, one.layers + other.layers, least)


def _nothing() -> _Front:
    return _Front(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), 0, 0.0)


def _thinned(memory: Integers, time: Integers) -> tuple[Integers, Integers]:
    order = np.lexsort((time, memory))
    memory, time = memory[order], time[order]
    keep = np.ones(len(order), dtype=bool)
    np.less(time[1:], np.minimum.accumulate(time)[:-1], out=keep[1:])
    return memory[keep], time[keep]
