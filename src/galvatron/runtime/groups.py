"""The pool of communication groups (paper Section 4): each distinct set of ranks is one group, created once.

Every rank creates all groups of the plan in the plan's order, as PyTorch demands. NCCL or gloo, whatever the default
group runs on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from galvatron.spec import Digit

__all__ = ["GroupKey", "GroupPool", "Position", "partition", "ranks_along", "spell"]


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
