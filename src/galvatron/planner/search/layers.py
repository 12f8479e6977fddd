"""The model's layers as the search sees them, and what makes two stages alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from galvatron.planner.cost import Integers
from galvatron.planner.cost.arrays import Places

__all__ = ["Layers", "Signature", "Spans"]

Signature = tuple[int, tuple[tuple[int, int], ...], bool]
"""(kind of the layer before the stage or -1, runs of (kind, length), whether the stage is the last)."""


@dataclass(frozen=True, slots=True)
class Spans:
    """All stages of up to so many layers, by end and width. Stages with the same signature have the same number."""

    number: Places
    """(L+1, W+1), 0 where there is no stage. More widths leave the numbers of these as they are."""
    ends: Integers
    """(N,) where some stage of each number ends; of number 0 before it begins."""
    widths: Integers
    """(N,)"""

    @property
    def begins(self) -> Integers:
        begins: Integers = np.maximum(self.ends - self.widths, 0)
        return begins

    def numbers(self, positions: Sequence[int]) -> list[int]:
        """Of the stages between these positions."""
        return [int(self.number[end, end - begin]) for begin, end in pairwise(positions)]


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
        self._spans: dict[int, Spans] = {}

    def signature(self, begin: int, end: int) -> Signature:
        runs = tuple((int(kind), len(list(group))) for kind, group in groupby(self.kinds[begin:end].tolist()))
        return int(self.kinds[begin - 1]) if begin else -1, runs, end == self.count

    def spans(self, width: int) -> Spans:
        """Stages of up to so many layers."""
        if width not in self._spans:
            self._spans[width] = self._numbered(width)
        return self._spans[width]

    def _numbered(self, most: int) -> Spans:
        """Two stages are alike if they are without their last layers, and those are of one kind; the model's last stage
        is like no other."""
        kind_count = len(self.total)
        number = np.zeros((self.count + 1, most + 1), dtype=np.intp)
        ends, widths = [np.zeros(1, dtype=np.int64)], [np.ones(1, dtype=np.int64)]
        alike = np.append(kind_count, self.kinds)  # by the layer before
        known = 1
        for width in range(1, most + 1):
            alike = alike[: self.count - width + 1] * (kind_count + 1) + self.kinds[width - 1 :]
            alike[-1] = -1
            _, first, alike = np.unique(alike, return_index=True, return_inverse=True)
            number[width:, width] = known + alike
            ends.append(first + width)
            widths.append(np.full(len(first), width))
            known += len(first)
        return Spans(number, np.concatenate(ends), np.concatenate(widths))
