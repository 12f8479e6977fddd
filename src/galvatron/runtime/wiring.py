"""Which communication groups a plan needs, in an order that is the same for every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from galvatron.cost import Schedule
from galvatron.models.layer import Tie
from galvatron.runtime.groups import GroupKey, partition
from galvatron.spec import Kind, Layout, Strategy, gathered_digits

__all__ = ["StagePlan", "backward_group", "forward_group", "needed_groups", "tie_group"]


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
    return GroupKey(forward_group(stages, boundary).ranks, "" if schedule is Schedule.GPIPE else "backward")


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
