"""Labels: partial assignments of a stage's first layers, extended a layer at a time as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.planner.cost import NEVER, Integers
from galvatron.planner.search.bounds import Floats
from galvatron.planner.search.choices import Useful

__all__ = ["STAND_IN", "Filler", "Labels"]

STAND_IN = -1
"""In place of a strategy's index: a layer whose choice is put off."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Partial assignments of the layers so far, sorted by layers put off and memory."""

    time: Integers
    memory: Integers
    layout: Integers
    put_off: Integers
    """Layers whose choice waits for the end; their time and memory are not counted yet."""

    @classmethod
    def start(cls, entry: Integers) -> Labels:
        """Before the first layer: the stage's input can arrive in any layout, at its price."""
        nothing = np.zeros(len(entry), dtype=np.int64)
        return cls(entry, nothing, np.arange(len(entry)), nothing)

    def extended(self, table: Useful, change: Integers | None) -> tuple[Labels, NDArray[np.intp], NDArray[np.intp]]:
        """All labels with one more layer, their parents, and the index of the strategy each took.

        On its way to a layout a label is dropped when another arrives there with no more memory and no more time.
        ``change``: time to change layout before the layer; None before the first, which takes its input as it comes.
        """
        if change is None:
            arriving = np.where(self.layout == table.layouts[:, None], self.time, NEVER)
            target, parent = np.nonzero(arriving < NEVER)
        else:
            arriving = change[self.layout][:, table.layouts].T + self.time
            target, parent = np.nonzero(_strict_minima(arriving - self.put_off * (4 * NEVER)))
        repeats = table.count[target]
        rows = np.repeat(np.arange(len(target)), repeats)
        base = np.arange(len(rows)) - np.repeat(np.cumsum(repeats) - repeats, repeats) + table.first[target][rows]
        time = arriving[target, parent][rows] + table.time[base]
        parent = parent[rows]
        grown = Labels(
            time,
            self.memory[parent] + table.memory[base],
            table.layout[base],
            self.put_off[parent] + (table.strategy[base] == STAND_IN),
        )
        return grown, parent, base

    def at(self, chosen: NDArray[np.intp]) -> Labels:
        return Labels(self.time[chosen], self.memory[chosen], self.layout[chosen], self.put_off[chosen])


@dataclass(frozen=True, slots=True)
class Filler:
    """The strategies that layers put off will take, and the least each such layer adds."""

    table: Useful
    least_memory: int
    priced: Floats
    """(J,) least time + λ·memory for each multiplier."""

    @classmethod
    def of(cls, table: Useful, lams: Floats) -> Filler:
        return cls(table, int(table.memory.min()), table.priced(lams)[1][:, 0])

    @classmethod
    def none(cls, lams: Floats) -> Filler:
        nothing = np.empty(0, dtype=np.int64)
        return cls(Useful(nothing, nothing, nothing, nothing), 0, np.zeros(len(lams)))


def _strict_minima(rows: Integers) -> NDArray[np.bool_]:
    """Where each row (sorted by memory) goes below all before it: labels not dominated on their way to a layout."""
    keep = np.ones(rows.shape, dtype=bool)
    np.less(rows[:, 1:], np.minimum.accumulate(rows, axis=1)[:, :-1], out=keep[:, 1:])
    return keep
