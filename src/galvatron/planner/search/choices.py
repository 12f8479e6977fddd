"""The strategies a layer may take, sorted and thinned to what can matter: the material of labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.planner.cost import NEVER, Integers
from galvatron.planner.search.bounds import Floats

__all__ = ["Choices", "Useful"]


@dataclass(frozen=True, slots=True)
class Choices:
    """Strategies of one kind of layer, sorted by layout, memory and time."""

    strategy: Integers
    time: Integers
    memory: Integers
    transient: Integers
    layout: Integers

    @classmethod
    def of(cls, time: Integers, memory: Integers, transient: Integers, layout: Integers) -> Choices:
        """From one kind's rows of the tables; what is not allowed (NEVER) is left out."""
        possible = np.nonzero(time < NEVER)[0]
        order = possible[np.lexsort((time[possible], memory[possible], layout[possible]))]
        return cls(order, time[order], memory[order], transient[order], layout[order])

    def useful(self, theta: int) -> Useful:
        """Those allowed under θ, without what another of the same layout beats in both time and memory."""
        allowed = np.nonzero(self.transient <= theta)[0]
        layout, time = self.layout[allowed], self.time[allowed]
        falling = time - layout * (4 * NEVER)  # each layout starts afresh, below all of the one before
        keep = np.ones(len(allowed), dtype=bool)
        keep[1:] = falling[1:] < np.minimum.accumulate(falling)[:-1]
        chosen = allowed[keep]
        return Useful(self.strategy[chosen], self.time[chosen], self.memory[chosen], layout[keep])


class Useful:
    """Strategies worth choosing for one kind of layer, grouped by layout."""

    def __init__(self, strategy: Integers, time: Integers, memory: Integers, layout: Integers) -> None:
        self.strategy, self.time, self.memory, self.layout = strategy, time, memory, layout
        self.first = np.append(0, np.nonzero(layout[1:] != layout[:-1])[0] + 1) if layout.size else layout
        """Index of each layout's first strategy."""
        self.count: Integers = np.diff(self.first, append=len(layout))
        """Number of strategies of each layout."""
        self.layouts = layout[self.first]
        """Layouts present."""

    def priced(self, lams: Floats) -> tuple[Floats, Floats]:
        """time + λ·memory of each strategy, (J, S), and the least of each layout present."""
        cost = self.time + lams[:, None] * self.memory
        return cost, np.minimum.reduceat(cost, self.first, axis=1)

    def lighter(self, memory: int) -> Useful:
        """The same choices with so many bytes less each."""
        return Useful(self.strategy, self.time, self.memory - memory, self.layout)

    def kept(self, keep: NDArray[np.bool_]) -> Useful:
        return Useful(self.strategy[keep], self.time[keep], self.memory[keep], self.layout[keep])
