"""The least time a stage of one combination can take, by where it begins and ends: a Lagrangian bound (``bounds.py``).

Layers only add up in it: it is the difference of two sums over all layers before a position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.planner.cost import NEVER, Integers
from galvatron.planner.search.bounds import Floats, few
from galvatron.planner.search.candidates import Candidates, CandidateTables
from galvatron.planner.search.layers import Layers

__all__ = ["LeastTimes"]

_MULTIPLIERS = 16
"""So many multipliers at most; more would hardly tighten the bounds."""


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """What all layers before a position, (P,) of them, need and cost at least."""

    transient: Integers
    """Of each kind of layer the least, (T,)."""
    needed: Integers
    """The least memory, (P,)."""
    lams: Floats
    priced: Floats
    """By multiplier, (N, P), least time + λ·memory, of memory what is above the least, to keep it accurate."""


class LeastTimes:
    """Bounds on the stages of one combination."""

    def __init__(
        self,
        layers: Layers,
        candidates: Candidates,
        tables: CandidateTables,
        transfers: tuple[Integers, Integers],
        budget: int,
    ) -> None:
        self._layers, self._candidates, self._tables, self._budget = layers, candidates, tables, budget
        self._prefixes: dict[int, _Prefixes] = {}
        """By micro-batches in flight."""
        self._entry, self._leave = self._least_transfers(*transfers)

    def times(self, in_flight_count: int, ends: NDArray[np.int64], widths: NDArray[np.int64] | int) -> Floats:
        """Of stages given by end and width. What has no layers, or begins before the first, is impossible."""
        begins = np.maximum(ends - widths, 0)
        prefixes = self._prefixes_of(in_flight_count)
        before = self._layers.counts_before
        present = before[:, ends] > before[:, begins]
        room = self._budget - np.where(present, prefixes.transient.reshape(-1, *[1] * ends.ndim), 0).max(axis=0)
        room = room - (prefixes.needed[ends] - prefixes.needed[begins])
        bounds = np.full(room.shape, -np.inf)
        for lam, sums in zip(prefixes.lams, prefixes.priced, strict=True):
            np.maximum(bounds, sums[ends] - sums[begins] - lam * room, out=bounds)
        bounds += self._entry[begins] + self._leave[ends]
        impossible = (room < 0) | (ends <= begins) | (ends < widths) | (bounds >= NEVER)
        return np.where(impossible, np.inf, np.ceil(bounds - 1e-3))

    def _prefixes_of(self, in_flight_count: int) -> _Prefixes:
        if in_flight_count not in self._prefixes:
            prices, before = (
                self._candidates.prices(self._tables, np.array([in_flight_count])),
                self._layers.counts_before,
            )
            lams = few(prices.multipliers(0), _MULTIPLIERS)
            priced: Floats = np.stack([prices.priced(lam)[0] for lam in lams]) @ before
            self._prefixes[in_flight_count] = _Prefixes(prices.transient[0], prices.memory[0] @ before, lams, priced)
        return self._prefixes[in_flight_count]

    def _least_transfers(self, transfer: Integers, gradient_transfer: Integers) -> tuple[Integers, Integers]:
        """Least time to receive a stage's input, by where it begins, and its output's gradient, by where it ends."""
        kinds, usable, costs = self._layers.kinds, self._tables.plain.time_ns[0] < NEVER, self._candidates.costs
        layouts = np.zeros((len(usable), len(costs.layouts)), dtype=bool)
        for kind, row in enumerate(usable):
            layouts[kind, costs.layout_of[row]] = True
        entry, leave = (np.zeros(self._layers.count + 1, dtype=np.int64) for _ in range(2))
        entry[1:-1] = np.where(layouts[kinds[1:]], transfer[kinds[:-1]], NEVER).min(axis=1)
        leave[1:-1] = np.where(layouts[kinds[:-1]], gradient_transfer[kinds[:-1]], NEVER).min(axis=1)
        return entry, leave
