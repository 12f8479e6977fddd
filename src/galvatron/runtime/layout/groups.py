"""The pool of communication groups (paper Section 4), and which of them a plan needs.

Each distinct set of ranks is one group, created once. Every rank creates all groups of the plan in the plan's order, as
PyTorch demands. NCCL or gloo, whatever the default group runs on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from galvatron.core.spec import Factor, Kind, Layout, Schedule, Strategy, gathered_factors, sequence_change
from galvatron.families.layer import Tie

__all__ = [
    "ChangeGroups",
    "GroupKey",
    "GroupPool",
    "LayerGroups",
    "Position",
    "StagePlan",
    "backward_group",
    "change_groups",
    "context_groups",
    "coordinate",
    "forward_group",
    "layer_groups",
    "needed_groups",
    "ranks_along",
    "rows_group",
    "tie_group",
]


class Position:
    """Where a rank stands: its stage's ranks, and its number among them."""

    def __init__(self, stage_ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(stage_ranks)
        self.rank = rank
        self.index = self.ranks.index(rank)


def coordinate(index: int, factors: Iterable[Factor]) -> int:
    """An index along some factors, as in a mesh of their sizes, the one with the largest stride first."""
    value = 0
    for factor in sorted(factors, reverse=True):
        value = value * factor.size + index // factor.stride % factor.size
    return value


def ranks_along(position: Position, factors: Iterable[Factor]) -> tuple[int, ...]:
    """The ranks of the stage that differ from this one in these factors only, in ascending order."""
    indices = [position.index]
    for factor in factors:
        zeroed = [index - index // factor.stride % factor.size * factor.stride for index in indices]
        indices = [index + value * factor.stride for index in zeroed for value in range(factor.size)]
    return tuple(sorted(position.ranks[index] for index in indices))


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

    def context_names(self, position: Position, layout: Layout) -> tuple[str, str]:
        """Names of the ring and of Ulysses' group that a rank is in where sequences are divided so; empty: of none."""
        ring, ulysses = (self.group(key) for key in context_groups(position, layout))
        return "" if ring is None else ring.group_name, "" if ulysses is None else ulysses.group_name


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


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of one layer that a rank is in."""

    tensor: GroupKey
    """Computes the layer together (TP); sequence parallelism divides sequences over it."""
    data: GroupKey
    """Holds the same parameters (DP, and context parallelism where it shards nothing)."""
    shard: GroupKey
    """Holds a part each of the parameters, or of gradients and states (SDP, ZeRO-2, ZeRO-3)."""
    ring: GroupKey
    """Has a sequence together: keys and values go round in it."""
    ulysses: GroupKey
    """Has a sequence, or a rank's part of it in the ring, together: exchanges heads for tokens."""
    expert_tensor: GroupKey
    """Computes the same experts together (their TP). This and what follows is for experts with axes of their own;
    those of other layers are computed and held as the rest of the layer."""
    expert_data: GroupKey
    """Holds the same experts (their DP)."""
    expert_shard: GroupKey
    """Holds a part each of the same experts (their SDP)."""
    dispatch: GroupKey
    """Has all experts together: tokens travel in it (EP)."""
    token_slices: GroupKey
    """Has the same tokens, which its ranks divide among them before their experts."""


@dataclass(frozen=True, slots=True)
class ChangeGroups:
    """The groups through which activations change their layout between two layers."""

    whole_sequence: GroupKey
    """Gathers sequences that the first layer has divided; one rank where they stay as they are."""
    forward_rows: GroupKey
    """Gathers rows on the way forward."""
    backward_rows: GroupKey
    divided_sequence: GroupKey
    """Divides sequences for the second layer."""


def layer_groups(position: Position, strategy: Strategy) -> LayerGroups:
    """The one place that says who communicates for a layer."""
    ring, ulysses = context_groups(position, Layout(frozenset(), strategy.context_factors, strategy.factors(Kind.RING)))
    return LayerGroups(
        tensor=GroupKey(ranks_along(position, strategy.factors(Kind.TP))),
        data=GroupKey(ranks_along(position, strategy.replica_factors)),
        shard=GroupKey(ranks_along(position, strategy.sharding_factors)),
        ring=ring,
        ulysses=ulysses,
        expert_tensor=GroupKey(ranks_along(position, strategy.expert_factors(Kind.TP))),
        expert_data=GroupKey(ranks_along(position, strategy.expert_factors(Kind.DP))),
        expert_shard=GroupKey(ranks_along(position, strategy.expert_factors(Kind.SDP))),
        # On channels of their own: in the same group tokens would wait for parameters that are gathered ahead.
        dispatch=GroupKey(ranks_along(position, strategy.expert_factors(Kind.EP)), "dispatch"),
        token_slices=GroupKey(ranks_along(position, strategy.token_slices)),
    )


def context_groups(position: Position, layout: Layout) -> tuple[GroupKey, GroupKey]:
    """The ring and Ulysses' group, where context parallelism divides sequences so. They have channels of their own, for
    the reason that dispatch has."""
    ring, ulysses = layout.zigzag, layout.sequence - layout.zigzag
    return GroupKey(ranks_along(position, ring), "ring"), GroupKey(ranks_along(position, ulysses), "ulysses")


def change_groups(position: Position, rows: int, source: Layout, target: Layout) -> ChangeGroups:
    """… and between two layers; ``rows``: of a micro-batch."""
    change = sequence_change(source, target)
    return ChangeGroups(
        whole_sequence=GroupKey(ranks_along(position, change.gathered)),
        forward_rows=GroupKey(ranks_along(position, gathered_factors(source.rows, target.rows, rows))),
        backward_rows=GroupKey(ranks_along(position, gathered_factors(target.rows, source.rows, rows))),
        divided_sequence=GroupKey(ranks_along(position, change.sliced)),
    )


def needed_groups(
    stages: Sequence[StagePlan], rows: int, ties: Sequence[Tie], schedule: Schedule, *, sums_rows: bool = False
) -> Iterator[GroupKey]:
    """Groups inside the stages, between neighbouring stages, and of stages with copies of a tied weight.

    ``rows``: of a micro-batch; ``sums_rows``: whether the last layer sums over all of them. Those of all ranks, in an
    order that is the same for everyone.
    """
    for stage in stages:
        layouts = [strategy.layout for strategy in stage.strategies]
        changes = [pair for pair in dict.fromkeys(pairwise(layouts)) if pair[0] != pair[1]]
        for rank in stage.ranks:
            position = Position(stage.ranks, rank)
            for strategy in dict.fromkeys(stage.strategies):
                yield from _keys(layer_groups(position, strategy))
            for source, target in changes:
                yield from _keys(change_groups(position, rows, source, target))
    for boundary in range(len(stages) - 1):
        yield forward_group(stages, boundary)
        yield backward_group(stages, boundary, schedule)
    for tie in ties:
        users = [stage for stage in stages if stage.uses(tie)]
        if len(users) > 1 or (users and tie.small):
            yield tie_group(users)
    if sums_rows:
        last = stages[-1]
        yield from (rows_group(Position(last.ranks, rank), last.strategies[-1]) for rank in last.ranks)


def _keys(groups: LayerGroups | ChangeGroups) -> Iterator[GroupKey]:
    return (getattr(groups, field.name) for field in fields(groups))


def forward_group(stages: Sequence[StagePlan], boundary: int) -> GroupKey:
    """Activations travel over every other boundary in one group, and over the rest in another: messages of a group wait
    for each other in NCCL, so a stage that sends to the next one could not receive from the one before. There are no
    more groups than that, because each costs NCCL buffers and threads."""
    reached = {stage for first in range(boundary % 2, len(stages) - 1, 2) for stage in (first, first + 1)}
    return GroupKey(tuple(sorted(rank for stage in reached for rank in stages[stage].ranks)))


def backward_group(stages: Sequence[StagePlan], boundary: int, schedule: Schedule) -> GroupKey:
    """Gradients travel among the same ranks, on channels of their own where activations travel at the same time."""
    return GroupKey(forward_group(stages, boundary).ranks, "backward" if schedule.both_ways_at_once else "")


def rows_group(position: Position, strategy: Strategy) -> GroupKey:
    """The ranks that have all rows of a micro-batch together."""
    return GroupKey(ranks_along(position, strategy.batch_factors))


def tie_group(users: Sequence[StagePlan]) -> GroupKey:
    """The ranks of all stages that use a tied weight."""
    ranks = tuple(sorted(rank for stage in users for rank in stage.ranks))
    return GroupKey(ranks)
