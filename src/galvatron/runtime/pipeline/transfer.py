"""Between stages: each rank receives just the rows and tokens its layer asks for, straight from ranks that hold them.

No Slice-Gather is needed there. Where activations and gradients travel at the same time (1F1B) they do so in groups of
their own, so that two stages that send to each other never wait for each other on one channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.core.spec import Layout, degree_of
from galvatron.runtime.data_parallel.shards import part_of
from galvatron.runtime.layout.groups import coordinate
from galvatron.runtime.layout.slice_gather import RowAssignment

__all__ = ["StageEnd", "StageTransfer"]


@dataclass(frozen=True, kw_only=True)
class StageEnd:
    """One end of a transfer: a stage's ranks, and the layout in which they hold the activation there."""

    ranks: tuple[int, ...]
    layout: Layout
    assignment: RowAssignment

    def rows(self, index: int) -> tuple[int, ...]:
        return self.assignment.numbers(index)

    def tokens(self, index: int) -> tuple[int, int]:
        """Which part of the tokens, of how many."""
        return coordinate(index, self.layout.sequence), degree_of(self.layout.sequence)


@dataclass(frozen=True, slots=True)
class _Message:
    """What goes between this rank and a peer: positions of rows in this rank's tensor, and its part of the tokens."""

    peer: int
    rows: tuple[int, ...]
    part: int
    parts: int

    def view(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that the message fills or is filled from; a copy where it is not one block."""
        first, last = self.rows[0], self.rows[-1]
        if self.rows == tuple(range(first, last + 1)):
            chosen = tensor[first : last + 1]
        else:
            chosen = tensor[torch.tensor(self.rows, device=tensor.device)]
        if self.parts == 1:
            return chosen
        tokens = part_of(chosen.shape[1], self.part, self.parts)
        return chosen[:, tokens.start : tokens.stop]

    def put(self, received: Tensor, tensor: Tensor) -> None:
        target = tensor
        if self.parts > 1:
            tokens = part_of(tensor.shape[1], self.part, self.parts)
            target = tensor[:, tokens.start : tokens.stop]
        target[torch.tensor(self.rows, device=tensor.device)] = received


class StageTransfer:
    """Sends and receives activations (or their gradients) over one boundary, in one direction."""

    def __init__(self, source: StageEnd, target: StageEnd, rank: int, group: ProcessGroup) -> None:
        self._group = group
        self.sends: list[_Message] = []
        self.receives: list[_Message] = []
        for sender, receiver, outgoing, incoming in _routes(source, target):
            if sender == rank:
                self.sends.append(outgoing)
            elif receiver == rank:
                self.receives.append(incoming)

    def send(self, tensors: Sequence[Tensor]) -> list[tuple[dist.Work, list[Tensor]]]:
        """Start sending; the buffers must be kept until the work is done."""
        buffers, operations = [], []
        for tensor in tensors:
            for message in self.sends:
                buffer = message.view(tensor.detach()).contiguous()
                buffers.append(buffer)
                operations.append(dist.P2POp(dist.isend, buffer, message.peer, self._group))
        return [(work, buffers) for work in _started(operations)]

    def tell(self, flags: Tensor) -> None:
        """Send a few numbers, the same from each of this side's ranks."""
        peers = dict.fromkeys(message.peer for message in self.sends)
        for work in _started([dist.P2POp(dist.isend, flags, peer, self._group) for peer in peers]):
            work.wait()

    def hear(self, flags: Tensor) -> None:
        """Receive what the other side tells."""
        peers = dict.fromkeys(message.peer for message in self.receives)
        for work in _started([dist.P2POp(dist.irecv, flags, peer, self._group) for peer in peers]):
            work.wait()

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Fill these tensors."""
        operations, copies = [], []
        for tensor in tensors:
            for message in self.receives:
                target = message.view(tensor)
                direct = target.is_contiguous() and _same_memory(target, tensor)
                buffer = target if direct else torch.empty_like(target, memory_format=torch.contiguous_format)
                operations.append(dist.P2POp(dist.irecv, buffer, message.peer, self._group))
                if not direct:
                    copies.append((message, buffer, tensor))
        for work in _started(operations):
            work.wait()
        for message, received, tensor in copies:
            message.put(received, tensor)


def _started(operations: list[dist.P2POp]) -> list[dist.Work]:
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return works


def _same_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _routes(source: StageEnd, target: StageEnd) -> Iterator[tuple[int, int, _Message, _Message]]:
    """For each piece that moves: sender, receiver, and the message as each of them sees it.

    A receiver takes each row from the nearest holder: the one of its own number in the stage, where that holds it, so
    that copies on tensor-parallel ranks share the work.
    """
    count = len(source.ranks)
    held = [{row: place for place, row in enumerate(source.rows(index))} for index in range(count)]
    for receiver in range(len(target.ranks)):
        part, parts = target.tokens(receiver)
        taken: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for place, row in enumerate(target.rows(receiver)):
            for piece, pieces, sender in _holders(source, held, row, part, parts, receiver):
                taken.setdefault((sender, piece, pieces), []).append((held[sender][row], place))
        for (sender, piece, pieces), places in taken.items():
            outgoing, incoming = _token_parts(source.tokens(sender), (part, parts), (piece, pieces))
            there, here = zip(*places, strict=True)
            yield (
                source.ranks[sender],
                target.ranks[receiver],
                _Message(target.ranks[receiver], tuple(there), *outgoing),
                _Message(source.ranks[sender], tuple(here), *incoming),
            )


def _holders(
    source: StageEnd, held: list[dict[int, int]], row: int, part: int, parts: int, receiver: int
) -> list[tuple[int, int, int]]:
    """(piece of the tokens, of how many, who sends it) that together are one row of the receiver's part."""
    count = len(held)
    near = [(receiver + step) % count for step in range(count)]
    holders = [sender for sender in near if row in held[sender]]
    splits = source.tokens(0)[1]
    finest = math.lcm(splits, parts)
    wanted = [piece for piece in range(finest) if piece * parts // finest == part]
    found = []
    for piece in wanted:
        sender = next(holder for holder in holders if source.tokens(holder)[0] == piece * splits // finest)
        found.append((piece, finest, sender))
    return found


def _token_parts(
    holds: tuple[int, int], wants: tuple[int, int], piece: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """A piece of the tokens as (part, parts) of what the sender holds, and of what the receiver wants."""
    number, finest = piece
    outgoing = (number - holds[0] * finest // holds[1], finest // holds[1])
    incoming = (number - wants[0] * finest // wants[1], finest // wants[1])
    return outgoing, incoming
