"""What each layer of a stage reads of a micro-batch: some rows, and of each, where context parallelism divides it, some
of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from galvatron.core.spec import Layout, Strategy
from galvatron.runtime.layout.slice_gather import RowAssignment, RowAssignments
from galvatron.runtime.layout.tokens import check_length, tokens_of

__all__ = ["Portion", "Portions"]


@dataclass(frozen=True, slots=True)
class Portion:
    """The part of a micro-batch that each rank of a stage reads at one layer."""

    rows: RowAssignment
    context: Layout | None
    """How context parallelism alone divides sequences; None: not at all. (Sequence parallelism divides activations,
    but each of its ranks reads all tokens.)"""

    def tokens(self, index: int, length: int) -> Tensor:
        """The numbers of the tokens that rank ``index`` of the stage reads."""
        if self.context is None:
            return torch.arange(length)
        check_length(self.context, length, "context parallelism")
        return tokens_of(self.context, index, length)


class Portions:
    """Of all layers of a stage."""

    def __init__(self, strategies: Sequence[Strategy], rows: int) -> None:
        """``rows``: of the micro-batch."""
        self.rows = rows
        self.assignments = RowAssignments([strategy.batch_factors for strategy in strategies], rows)
        at = [Portion(own, _context(strategy)) for own, strategy in zip(self.assignments.at, strategies, strict=True)]
        self.distinct: tuple[Portion, ...] = tuple(dict.fromkeys(at))
        self.numbers: tuple[int, ...] = tuple(self.distinct.index(portion) for portion in at)
        """Of each layer's portion among the distinct ones."""


def _context(strategy: Strategy) -> Layout | None:
    if not strategy.context_factors:
        return None
    return Layout(frozenset(), strategy.context_factors, strategy.layout.zigzag)
