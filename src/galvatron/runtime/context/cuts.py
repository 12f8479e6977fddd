"""Which parts of attention a rank computes: rectangles of its queries and of another rank's keys, and squares along the
diagonal, in which nothing is hidden. Documents and padding are cut off, not masked: a device computes only what counts,
by its own kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cut", "Zigzag"]

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Cut:
    """Queries of a rank that see keys of a rank."""

    rows: slice
    queries: slice
    """Of the one's tokens."""
    keys: slice
    """Of the other's tokens."""
    diagonal: bool
    """Queries and keys are the same tokens, and each sees itself and those before it; else each sees all."""

    def of(self, query: Tensor, held: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """These of queries, keys and values (rows, heads, tokens, width)."""
        key, value = held
        rows = self.rows
        return query[rows, :, self.queries], key[rows, :, self.keys], value[rows, :, self.keys]


@dataclass(frozen=True, slots=True)
class Zigzag:
    """A sequence whose tokens lie on the ranks of a ring in zig-zag order."""

    size: int
    """Ranks; one has the whole sequence."""
    count: int
    """Tokens of a rank."""

    def chunks(self, rank: int) -> list[tuple[int, int]]:
        """Of each chunk of a rank's tokens where it begins in the sequence, and where among the rank's own."""
        each = self.each
        if self.size == 1:
            return [(0, 0)]
        return [(rank * each, 0), ((2 * self.size - 1 - rank) * each, each)]

    @property
    def each(self) -> int:
        """Tokens of a chunk."""
        return self.count if self.size == 1 else self.count // 2

    def cuts(self, rank: int, source: int, runs: Tensor | None, *, causal: bool) -> list[Cut]:
        """What the queries of ``rank`` see of the keys of ``source``. ``runs``: as of
        :class:`~galvatron.families.context.ContextMask`."""
        if runs is not None:
            return list(self._cut(rank, source, runs, causal=causal))
        half = self.count // 2
        if causal and source < rank:
            return [Cut(_ALL, _ALL, slice(0, half), False)]
        if causal and source > rank:
            return [Cut(_ALL, slice(half, self.count), _ALL, False)]
        return [Cut(_ALL, _ALL, _ALL, causal)]

    def _cut(self, rank: int, source: int, runs: Tensor, *, causal: bool) -> Iterator[Cut]:
        row, first, last, begin, end = runs.unbind(1)
        each = self.each
        for mine, place in self.chunks(rank):
            for other, there in self.chunks(source):
                if causal and other > mine:
                    continue
                keys = begin.clamp(min=other), end.clamp(max=other + each)
                queries = first.clamp(min=mine), last.clamp(max=mine + each)
                same = causal and other == mine
                found = [(keys, True), ((keys[1], queries[1]), False)] if same else [(queries, False)]
                for (start, stop), diagonal in found:
                    some = (keys[0] < keys[1]) & (start < stop)
                    places = (row, start - mine + place, stop - mine + place, *(own - other + there for own in keys))
                    for number, *bounds in torch.stack(places, 1)[some].tolist():
                        yield Cut(slice(number, number + 1), slice(*bounds[:2]), slice(*bounds[2:]), diagonal)
