"""Tied weights in several stages: copies that stay equal because each gets the sum of all copies' gradients.

Every rank holds some rows of its stage's copy. It sends its gradient to, and receives from, the ranks of the other
stages that hold the same rows: a copy's gradient crosses the boundary once, in the pieces in which it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.core.spec import Kind, Strategy, degree_of
from galvatron.runtime.collectives import finish
from galvatron.runtime.data_parallel.shards import part_of
from galvatron.runtime.layout.groups import coordinate

__all__ = ["Holding", "TieExchange", "holdings"]

_CHUNK_BYTES = 25 << 20
"""Of the rows that are summed at a time."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Rows of the tied weight that a rank holds."""

    rank: int
    start: int
    stop: int


def holdings(ranks: Sequence[int], strategy: Strategy, rows: int, *, splits: bool) -> list[Holding]:
    """The rows of a weight that each rank of a stage holds. ``splits``: tensor parallelism divides them too."""
    sharding = strategy.sharding_factors
    degree = strategy.degree(Kind.TP) if splits else 1
    shards = degree_of(sharding)
    found = []
    for index, rank in enumerate(ranks):
        held = part_of(rows, coordinate(index, strategy.factors(Kind.TP)) if splits else 0, degree)
        mine = part_of(len(held), coordinate(index, sharding), shards)
        found.append(Holding(rank, held.start + mine.start, held.start + mine.stop))
    return found


class TieExchange:
    """Sums one tied weight's gradient over its copies, some rows after the other, so that little is held twice."""

    def __init__(self, copies: Sequence[Sequence[Holding]], rank: int, group: ProcessGroup) -> None:
        """``copies``: for each stage with a copy, what each of its ranks holds."""
        self._group = group
        self._mine = next(number for number, copy in enumerate(copies) if any(own.rank == rank for own in copy))
        own = copies[self._mine]
        me = next(holding for holding in own if holding.rank == rank)
        self._start, self._stop = me.start, me.stop
        self._sends: list[Holding] = []
        self._receives = [[] if copy is own else _sources(me, own, copy) for copy in copies]
        """From each copy, in the order of stages."""
        for copy in copies:
            for other in () if copy is own else copy:
                pieces = _sources(other, copy, own)
                self._sends += (replace(piece, rank=other.rank) for piece in pieces if piece.rank == rank)

    def __call__(self, gradient: Tensor) -> None:
        """Add the other copies' gradients to this one, in place; all stages in one order, so that the sums are equal to
        the last bit."""
        if not len(gradient):
            return
        step = max(_CHUNK_BYTES // gradient[0].nbytes, 1)
        for begin in range(self._start // step * step, self._stop, step):
            self._sum(gradient, begin, begin + step)

    def _sum(self, gradient: Tensor, begin: int, end: int) -> None:
        """The rows of the weight between two numbers, which are the same for all ranks."""

        def rows(piece: Holding) -> Tensor:
            return gradient[piece.start - self._start : piece.stop - self._start]

        sends = _within(self._sends, begin, end)
        receives = [_within(pieces, begin, end) for pieces in self._receives]
        received = [[rows(piece).new_empty(rows(piece).shape) for piece in pieces] for pieces in receives]
        operations = [dist.P2POp(dist.isend, rows(piece).contiguous(), piece.rank, self._group) for piece in sends]
        operations += [
            dist.P2POp(dist.irecv, buffer, piece.rank, self._group)
            for pieces, buffers in zip(receives, received, strict=True)
            for piece, buffer in zip(pieces, buffers, strict=True)
        ]
        finish(dist.batch_isend_irecv(operations) if operations else ())
        total = gradient[max(begin - self._start, 0) : end - self._start]
        own = total.clone()
        total.zero_()
        for number, (pieces, buffers) in enumerate(zip(receives, received, strict=True)):
            if number == self._mine:
                total += own
            for piece, buffer in zip(pieces, buffers, strict=True):
                rows(piece).add_(buffer)


def _within(pieces: Sequence[Holding], begin: int, end: int) -> list[Holding]:
    """The parts of pieces between two rows."""
    cut = (replace(piece, start=max(piece.start, begin), stop=min(piece.stop, end)) for piece in pieces)
    return [piece for piece in cut if piece.start < piece.stop]


def _sources(receiver: Holding, copy: Sequence[Holding], other: Sequence[Holding]) -> list[Holding]:
    """Pieces of another copy that cover a receiver's rows, each from one of its holders.

    Holders of equal rows take turns, by the receiver's number in its stage.
    """
    place = next(index for index, holding in enumerate(copy) if holding.rank == receiver.rank)
    by_rows: dict[tuple[int, int], list[int]] = {}
    for holding in other:
        if holding.start < holding.stop:
            by_rows.setdefault((holding.start, holding.stop), []).append(holding.rank)
    pieces = []
    for (start, stop), holders in sorted(by_rows.items()):
        first, last = max(start, receiver.start), min(stop, receiver.stop)
        if first < last:
            pieces.append(Holding(holders[place % len(holders)], first, last))
    return pieces
