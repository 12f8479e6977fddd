"""Which communication groups a plan needs, in an order that is the same for every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from galvatron.models.layer import Tie
from galvatron.runtime.groups import GroupKey, partition
from galvatron.runtime.layout import Grid
from galvatron.spec import Kind, Layout, Strategy

__all__ = ["BACKWARD", "FORWARD", "TIES", "StagePlan", "needed_groups"]

FORWARD, BACKWARD, TIES = "forward", "backward", "ties"
"""Purposes of groups that span stages."""


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


def needed_groups(stages: Sequence[StagePlan], grids: Sequence[Grid], ties: Sequence[Tie]) -> Iterator[GroupKey]:
    """Groups inside the stages, between neighbouring stages, and of stages with copies of a tied weight."""
    for stage, grid in zip(stages, grids, strict=True):
        for digits in dict.fromkeys(_digits(stage, grid)):
            for ranks in partition(stage.ranks, digits):
                yield GroupKey(ranks)
    for first, second in pairwise(stages):
        for purpose in (FORWARD, BACKWARD):
            yield GroupKey(tuple(sorted(first.ranks + second.ranks)), purpose)
    for tie in ties:
        ranks = tuple(sorted(rank for stage in stages if stage.uses(tie) for rank in stage.ranks))
        yield GroupKey(ranks, TIES)


def _digits(stage: StagePlan, grid: Grid) -> Iterator[Layout]:
    before: Strategy | None = None
    for strategy in stage.strategies:
        if before is not None:
            yield grid.gathered(before.layout, strategy.layout)
            yield grid.gathered(strategy.layout, before.layout)
        for kind in Kind:
            yield strategy.digits(kind)
        before = strategy
