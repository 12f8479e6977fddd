"""Tied weights in several stages: copies that stay equal because each gets the sum of all copies' gradients.

Every rank holds some rows of its stage's copy. It sends its gradient to, and receives from, the ranks of the other
stages that hold the same rows: a copy's gradient crosses the boundary once, in the pieces in which it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.core.spec import Kind, Strategy, degree_of
from galvatron.runtime.collectives import finish
from galvatron.runtime.data_parallel.shards import part_of
from galvatron.runtime.layout.groups import coordinate

__all__ = ["Holding", "TieExchange", "holdings"]


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
    """Sums one tied weight's gradient over its copies."""

    def __init__(self, copies: Sequence[Sequence[Holding]], rank: int, group: ProcessGroup) -> None:
        """``copies``: for each stage with a copy, what each of its ranks holds."""
        self._group = group
        self._sends: list[tuple[int, int, int]] = []
        self._receives: list[tuple[int, int, int]] = []
        self._copies: list[list[int]] = []
        """Of each copy, in the order of stages, which of the received pieces are its."""
        mine = next(index for index, copy in enumerate(copies) if any(holding.rank == rank for holding in copy))
        self._mine = mine
        me = next(holding for holding in copies[mine] if holding.rank == rank)
        for index, copy in enumerate(copies):
            before = len(self._receives)
            if index == mine:
                self._copies.append([])
                continue
            for sender, start, stop in _sources(me, copies[mine], copy):
                self._receives.append((sender, start - me.start, stop - me.start))
            for other in copy:
                for sender, start, stop in _sources(other, copy, copies[mine]):
                    if sender == rank:
                        self._sends.append((other.rank, start - me.start, stop - me.start))
            self._copies.append(list(range(before, len(self._receives))))

    def __call__(self, gradient: Tensor) -> None:
        """Add the other copies' gradients to this one, in place; all stages in one order, so that the sums are equal to
        the last bit."""
        sending = [gradient[start:stop].clone() for _, start, stop in self._sends]
        received = [gradient.new_empty(stop - start, *gradient.shape[1:]) for _, start, stop in self._receives]
        operations = [
            dist.P2POp(operation, tensor, peer, self._group)
            for operation, tensors, messages in (
                (dist.isend, sending, self._sends),
                (dist.irecv, received, self._receives),
            )
            for tensor, (peer, _, _) in zip(tensors, messages, strict=True)
        ]
        finish(dist.batch_isend_irecv(operations) if operations else ())
        own = gradient.clone()
        gradient.zero_()
        for copy, pieces in enumerate(self._copies):
            if copy == self._mine:
                gradient += own
            for piece in pieces:
                _, start, stop = self._receives[piece]
                gradient[start:stop] += received[piece]


def _sources(receiver: Holding, copy: Sequence[Holding], other: Sequence[Holding]) -> list[tuple[int, int, int]]:
    """(sender, start, stop): pieces of another copy that cover a receiver's rows, each from one of its holders.

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
            pieces.append((holders[place % len(holders)], first, last))
    return pieces
