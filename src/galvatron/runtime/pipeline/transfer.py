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

from galvatron.core.spec import Layout, sequence_pieces
from galvatron.runtime.data_parallel.shards import part_of
from galvatron.runtime.layout.slice_gather import RowAssignment
from galvatron.runtime.layout.tokens import chunks_of

__all__ = ["StageEnd", "StageTransfer"]


@dataclass(frozen=True, kw_only=True)
class StageEnd:
    """One end of a transfer: a stage's ranks, and the layout in which they hold the activation there."""

    ranks: tuple[int, ...]
    layout: Layout
    assignment: RowAssignment

    def rows(self, index: int) -> tuple[int, ...]:
        return self.assignment.numbers(index)

    def chunks(self, index: int, count: int) -> tuple[int, ...]:
        """Which of so many chunks of the tokens, in the order in which it holds them."""
        return tuple(chunk for run in sequence_pieces(self.layout, index, count) for chunk in run)


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
    chunks = math.lcm(chunks_of(source.layout), chunks_of(target.layout))
    held = [{row: place for place, row in enumerate(source.rows(index))} for index in range(count)]
    tokens = [{chunk: place for place, chunk in enumerate(source.chunks(index, chunks))} for index in range(count)]
    for receiver in range(len(target.ranks)):
        wanted = target.chunks(receiver, chunks)
        near = [(receiver + step) % count for step in range(count)]
        taken: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for place, row in enumerate(target.rows(receiver)):
            for position, chunk in enumerate(wanted):
                sender = next(own for own in near if row in held[own] and chunk in tokens[own])
                taken.setdefault((sender, chunk, position), []).append((held[sender][row], place))
        for (sender, chunk, position), places in taken.items():
            there, here = zip(*places, strict=True)
            yield (
                source.ranks[sender],
                target.ranks[receiver],
                _Message(target.ranks[receiver], tuple(there), tokens[sender][chunk], len(tokens[sender])),
                _Message(source.ranks[sender], tuple(here), position, len(wanted)),
            )
