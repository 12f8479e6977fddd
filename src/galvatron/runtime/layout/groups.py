"""The pool of communication groups (paper Section 4), and which of them a plan needs.

Each distinct set of ranks is one group, created once. Every rank creates all groups of the plan in the plan's order, as
PyTorch demands. NCCL or gloo, whatever the default group runs on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from galvatron.core.spec import Digit, Kind, Layout, Schedule, Strategy, gathered_digits
from galvatron.families.layer import Tie

__all__ = [
    "GroupKey",
    "GroupPool",
    "Position",
    "StagePlan",
    "backward_group",
    "forward_group",
    "needed_groups",
    "partition",
    "ranks_along",
    "spell",
    "tie_group",
]


class Position:
    """Where a rank stands: its stage's ranks, and its number among them."""

    def __init__(self, stage_ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(stage_ranks)
        self.rank = rank
        self.index = self.ranks.index(rank)


def spell(index: int, digits: Iterable[Digit]) -> int:
    """The number that some digits of an index spell, the one with the largest stride first."""
    value = 0
    for digit in sorted(digits, reverse=True):
        value = value * digit.radix + index // digit.stride % digit.radix
    return value


def ranks_along(position: Position, digits: Iterable[Digit]) -> tuple[int, ...]:
    """The ranks of the stage that differ from this one in these digits only, in ascending order."""
    indices = [position.index]
    for digit in digits:
        zeroed = [index - index // digit.stride % digit.radix * digit.stride for index in indices]
        indices = [index + value * digit.stride for index in zeroed for value in range(digit.radix)]
    return tuple(sorted(position.ranks[index] for index in indices))


def partition(ranks: Sequence[int], digits: Iterable[Digit]) -> list[tuple[int, ...]]:
    """A stage's ranks in groups whose members differ in these digits only."""
    digits = tuple(digits)
    groups = (ranks_along(Position(ranks, rank), digits) for rank in ranks)
    return list(dict.fromkeys(groups))


@dataclass(frozen=True, slots=True)
class GroupKey:
    """A group by its ranks. Groups of different purpose have channels of their own."""

    ranks: tuple[int, ...]
    purpose: str = ""


class GroupPool:
    """All groups of a plan. Groups of one rank need no communication and are None."""

    def __init__(self, needed: Iterable[GroupKey], device: torch.device) -> None:
        """Create them, in this order; every rank must be given all of them, those of others too."""
        self._groups: dict[GroupKey, ProcessGroup] = {}
        rank, everyone = dist.get_rank(), tuple(range(dist.get_world_size()))
        for key in dict.fromkeys(needed):
            if len(key.ranks) == 1:
                continue
            # Its ``use_local_synchronization``, which only members would have to call, names a group by how many each
            # rank already has, so that members which differ in that wait for each other for ever.
            group = dist.group.WORLD if key == GroupKey(everyone) else dist.new_group(list(key.ranks))
            if rank in key.ranks:
                assert isinstance(group, ProcessGroup)
                _connect(group, device)
                self._groups[key] = group

    def __len__(self) -> int:
        return len(self._groups)

    def group(self, key: GroupKey) -> ProcessGroup | None:
        """A group that this rank is in."""
        return None if len(key.ranks) == 1 else self._groups[key]

    def along(self, position: Position, digits: Iterable[Digit]) -> ProcessGroup | None:
        """The group of the ranks that differ from this one in these digits only."""
        return self.group(GroupKey(ranks_along(position, digits)))


def _connect(group: ProcessGroup, device: torch.device) -> None:
    """NCCL connects a group when it is made, or, where the program did not name its device to PyTorch, when all members
    first use it. Stages do that one after the other, and each would wait for the next."""
    assert dist.group.WORLD is not None
    if device.type == "cuda" and dist.group.WORLD.bound_device_id is None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What the plan says about one stage, parsed."""

    ranks: tuple[int, ...]
    first: int
    """Index of its first layer in the model."""
    strategies: tuple[Strategy, ...]

    @property
    def layers(self) -> range:
        return range(self.first, self.first + len(self.strategies))

    def uses(self, tie: Tie) -> bool:
        """Whether one of its layers uses a tied weight."""
        return any(use.layer in self.layers for use in tie.uses)


def needed_groups(
    stages: Sequence[StagePlan], rows: int, ties: Sequence[Tie], schedule: Schedule
) -> Iterator[GroupKey]:
    """Groups inside the stages, between neighbouring stages, and of stages with copies of a tied weight.

    ``rows``: of a micro-batch.
    """
    for stage in stages:
        for digits in dict.fromkeys(_digits(stage, rows)):
            for ranks in partition(stage.ranks, digits):
                yield GroupKey(ranks)
    for boundary in range(len(stages) - 1):
        yield forward_group(stages, boundary)
        yield backward_group(stages, boundary, schedule)
    for tie in ties:
        users = [stage for stage in stages if stage.uses(tie)]
        if len(users) > 1 or (users and tie.small):
            yield tie_group(users)


def forward_group(stages: Sequence[StagePlan], boundary: int) -> GroupKey:
    """Activations travel over every other boundary in one group, and over the rest in another: messages of a group wait
    for each other in NCCL, so a stage that sends to the next one could not receive from the one before. There are no
    more groups than that, because each costs NCCL buffers and threads."""
    reached = {stage for first in range(boundary % 2, len(stages) - 1, 2) for stage in (first, first + 1)}
    return GroupKey(tuple(sorted(rank for stage in reached for rank in stages[stage].ranks)))


def backward_group(stages: Sequence[StagePlan], boundary: int, schedule: Schedule) -> GroupKey:
    """Gradients travel among the same ranks, on channels of their own where activations travel at the same time."""
    return GroupKey(forward_group(stages, boundary).ranks, "backward" if schedule.both_ways_at_once else "")


def tie_group(users: Sequence[StagePlan]) -> GroupKey:
    """The ranks of all stages that use a tied weight."""
    ranks = tuple(sorted(rank for stage in users for rank in stage.ranks))
    return GroupKey(ranks)


def _digits(stage: StagePlan, rows: int) -> Iterator[Layout]:
    before: Strategy | None = None
    for strategy in stage.strategies:
        if before is not None:
            yield gathered_digits(before.layout, strategy.layout, rows)
            yield gathered_digits(strategy.layout, before.layout, rows)
        for kind in Kind:
            yield strategy.digits(kind)
        before = strategy
