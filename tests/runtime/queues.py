"""What NCCL would make of the messages that ranks exchange over gloo.

Gloo lets the operations of a group overtake each other. NCCL runs those of a group one after the other, in the order in
which a rank started them. Ranks that start them in different orders wait for each other for ever. So each rank notes
what it starts and what it waits for, and the notes of all are then played through with such queues.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

__all__ = ["Noted", "Notes", "note_messages", "stuck"]

_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "broadcast", "reduce",
    "gather", "scatter", "barrier",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Noted:
    """Something that a rank started, or a wait for it."""

    number: int
    group: str = ""
    """Empty: this is the wait."""
    ranks: tuple[int, ...] = ()
    what: str = ""
    """The collective; empty: messages."""
    messages: tuple[tuple[str, int], ...] = ()
    """("send" or "recv", the other rank), all started together."""
    thread: str = ""
    """The name of the rank's thread: a checkpoint is saved by one that the others do not wait for."""


@dataclass
class Notes:
    """Of one process."""

    noted: list[Noted] = field(default_factory=list)
    _works: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    _batch: list[tuple[Any, str, int]] | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def take(self) -> list[Noted]:
        """All since the last time."""
        taken, self.noted = self.noted, []
        return taken

    def collective(self, group: ProcessGroup, what: str, work: Any) -> None:
        self._note(group, (work,), what=what)

    def message(self, group: ProcessGroup, what: str, place: int, work: Any) -> None:
        peer = dist.get_global_rank(group, place)
        if self._batch is None:
            self._note(group, (work,), messages=((what, peer),))
        else:
            self._batch.append((work, what, peer))

    def batch(self, operations: Sequence[dist.P2POp]) -> Any:
        """In the place of ``batch_isend_irecv``."""
        self._batch = []
        try:
            works = _BATCH(list(operations))
        finally:
            sent, self._batch = self._batch, None
        group = operations[0].group
        assert isinstance(group, ProcessGroup)
        self._note(group, [work for work, _, _ in sent], messages=tuple((what, peer) for _, what, peer in sent))
        return works

    def waited(self, work: Any) -> None:
        if work in self._works:
            self.noted.append(Noted(self._works[work], thread=threading.current_thread().name))

    def _note(self, group: ProcessGroup, works: Sequence[Any], **what: Any) -> None:
        number = next(self._numbers)
        ranks = tuple(dist.get_process_group_ranks(group))
        self.noted.append(Noted(number, group.group_name, ranks, thread=threading.current_thread().name, **what))
        for work in works:
            if work is not None:
                self._works[work] = number


_BATCH = dist.batch_isend_irecv


def note_messages() -> Notes:
    """Note all that this process starts from now on; what compiled graphs and C++ start by themselves is not seen."""
    notes = Notes()

    def collective(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **named: Any) -> Any:
            work = own(group, *args, **named)
            notes.collective(group, name, work)
            return work

        return call

    def message(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, tensors: Any, place: int, *args: Any) -> Any:
            work = own(group, tensors, place, *args)
            notes.message(group, name, place, work)
            return work

        return call

    def wait(work: Any, *args: Any, **named: Any) -> Any:
        notes.waited(work)
        return own_wait(work, *args, **named)

    own_wait = Work.wait
    Work.wait = wait  # type: ignore[assignment, method-assign]
    for name in _COLLECTIVES:
        if hasattr(ProcessGroup, name):
            setattr(ProcessGroup, name, collective(name, getattr(ProcessGroup, name)))
    for name in ("send", "recv"):
        setattr(ProcessGroup, name, message(name, getattr(ProcessGroup, name)))
    dist.batch_isend_irecv = notes.batch  # type: ignore[assignment]
    return notes


class _Rank:
    """A rank as it is played through."""

    def __init__(self, number: int, noted: Sequence[Noted]) -> None:
        self.number = number
        self._programs: dict[str, deque[Noted]] = {}
        for own in noted:
            self._programs.setdefault(own.thread, deque()).append(own)
        self._under_way: set[int] = set()
        self.queues: dict[str, deque[Noted]] = {}
        self.open: dict[int, list[tuple[str, int]]] = {}
        """Messages that have not been exchanged, of those started together."""

    def advance(self) -> bool:
        """Start what comes next, each thread up to a wait for what is not done."""
        return sum(map(self._advance, self._programs.values())) > 0

    def _advance(self, program: deque[Noted]) -> int:
        before = len(program)
        while program:
            noted = program[0]
            if not noted.group and noted.number in self._under_way:
                break
            program.popleft()
            if noted.group:
                self._under_way.add(noted.number)
                self.queues.setdefault(noted.group, deque()).append(noted)
                self.open[noted.number] = list(noted.messages)
        return before - len(program)

    @property
    def waits(self) -> bool:
        return any(self._programs.values()) or any(self.queues.values())

    def head(self, group: str) -> Noted | None:
        queue = self.queues.get(group)
        return queue[0] if queue else None

    def done(self, group: str) -> None:
        self._under_way.discard(self.queues[group].popleft().number)

    def __str__(self) -> str:
        heads = (
            f"{queue[0].what or self.open[queue[0].number]} in group {queue[0].group} of {queue[0].ranks}"
            for queue in self.queues.values()
            if queue
        )
        return f"rank {self.number}: {'; '.join(heads) or 'nothing started'}"


def stuck(noted: Sequence[Sequence[Noted]]) -> str | None:
    """What the ranks wait for in the end, if they do not come to the end of their notes."""
    ranks = [_Rank(number, own) for number, own in enumerate(noted)]
    moved = True
    while moved:
        moved = sum(rank.advance() for rank in ranks) > 0
        for rank in ranks:
            for group in list(rank.queues):
                head = rank.head(group)
                if head is not None:
                    moved |= _exchanged(rank, head, ranks) if head.messages else _together(head, ranks)
    waiting = [rank for rank in ranks if rank.waits]
    return "\n".join(map(str, waiting)) if waiting else None


def _together(head: Noted, ranks: Sequence[_Rank]) -> bool:
    """Whether all of a group have come to the same collective."""
    members = [ranks[number] for number in head.ranks]
    heads = [member.head(head.group) for member in members]
    if any(own is None or own.what != head.what for own in heads):
        return False
    for member in members:
        member.done(head.group)
    return True


def _exchanged(rank: _Rank, head: Noted, ranks: Sequence[_Rank]) -> bool:
    """Exchange the messages whose other end is ready, too."""
    moved = False
    for what, peer in list(rank.open[head.number]):
        other = ranks[peer]
        there = other.head(head.group)
        wanted = ("recv" if what == "send" else "send", rank.number)
        if there is not None and wanted in other.open[there.number]:
            rank.open[head.number].remove((what, peer))
            other.open[there.number].remove(wanted)
            moved = True
            if other is not rank and not other.open[there.number]:
                other.done(head.group)
    if moved and not rank.open[head.number]:
        rank.done(head.group)
    return moved
