"""The model's layers as the search sees them, and what makes two stages alike."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from galvatron.planner.cost import Integers

__all__ = ["Layers", "Signature"]

Signature = tuple[int, tuple[tuple[int, int], ...], bool]
"""(kind of the layer before the stage or -1, runs of (kind, length), whether the stage is the last)."""


class Layers:
    """The model's layers as kind indices, with the counts that bounds need."""

    def __init__(self, kinds: Integers, kind_count: int) -> None:
        self.kinds = kinds
        self.count = len(kinds)
        one_hot = np.zeros((kind_count, self.count + 1), dtype=np.int64)
        one_hot[kinds, np.arange(1, self.count + 1)] = 1
        self.counts_before: Integers = np.cumsum(one_hot, axis=1)
        """(T, L+1): layers of each kind before a position."""
        self.total: Integers = self.counts_before[:, -1]
        changes = np.append(True, kinds[1:] != kinds[:-1])
        self.run_begin: Integers = np.maximum.accumulate(np.where(changes, np.arange(self.count), 0))
        """(L,) first layer of the run of equal layers that a layer is in."""
        self._ends: dict[Signature, list[int]] = {}

    def signature(self, begin: int, end: int) -> Signature:
        runs = tuple((int(kind), len(list(group))) for kind, group in groupby(self.kinds[begin:end].tolist()))
        return int(self.kinds[begin - 1]) if begin else -1, runs, end == self.count

    def ends(self, signature: Signature) -> list[int]:
        """Where stages of this signature end."""
        if signature not in self._ends:
            self._ends[signature] = self._find_ends(signature)
        return self._ends[signature]

    def _find_ends(self, signature: Signature) -> list[int]:
        before, runs, last = signature
        width = sum(length for _, length in runs)
        if last:
            return [self.count]
        ends = np.arange(width, self.count)
        begins = ends - width
        fits = (self.kinds[begins] == runs[0][0]) & (np.where(begins > 0, self.kinds[begins - 1], -1) == before)
        if len(runs) == 1:
            fits &= self.run_begin[ends - 1] <= begins
            return [int(end) for end in ends[fits]]
        return [end for end in ends[fits].tolist() if self.signature(end - width, end) == signature]
