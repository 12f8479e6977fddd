"""Which rows of a micro-batch a rank holds, and Slice-Gather between layers that differ (paper Section 4).

Rows are divided by a set of factors of the rank. From A to B a rank slices its rows by the factors in B∖A, which sends
nothing, and all-gathers over those in A∖B: the least volume there is. Backward of A→B is forward of B→A,
because each rank holds the gradient of the whole loss by its own rows.

Which rows those are follows from layer to layer: the first has them in the order of the batch, and each change takes
them as they lie. Nothing is put back into order, so a change only asks for what its own two layouts need.

A layer with sequence or context parallelism takes and gives activations divided along the sequence; all others take
whole sequences. Between layers of different layouts the sequence is gathered as far as the two do not divide it alike,
the rows change, and the sequence is divided again. In a ring tokens lie in zig-zag order, so they are put into order
between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.core.spec import Factor, Factors, Layout, degree_of, factor_by_factor, sequence_change
from galvatron.families.layer import Activations
from galvatron.runtime import collectives
from galvatron.runtime.layout.groups import GroupKey, GroupPool, Position, change_groups, coordinate
from galvatron.runtime.layout.tokens import TokenOrder, part_under
from galvatron.runtime.tensor_parallel import operators

__all__ = ["LayoutChange", "RowAssignment", "RowAssignments"]


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """The rows that each rank holds at one layer."""

    factors: Factors
    order: tuple[int, ...]
    """All rows: those of the ranks whose coordinate is 0, then 1, …"""

    def numbers(self, index: int) -> tuple[int, ...]:
        """The row numbers that rank ``index`` of the stage holds, in its order."""
        each = len(self.order) // degree_of(self.factors)
        first = coordinate(index, self.factors) * each
        return self.order[first : first + each]

    def take(self, whole: Tensor, index: int) -> Tensor:
        """The rows of a whole micro-batch that rank ``index`` of the stage holds."""
        numbers = self.numbers(index)
        if numbers == tuple(range(numbers[0], numbers[-1] + 1)):
            return whole[numbers[0] : numbers[-1] + 1]
        return whole[torch.tensor(numbers, device=whole.device)]

    def changed(self, target: Factors) -> RowAssignment:
        """Where the rows lie when other factors divide them.

        Factor by factor they are seen as a grid, with an axis for each factor that divides them now, then for those
        they are sliced by, then for the rest. What a rank gathers lies one behind the other in what it has then.
        """
        if not factor_by_factor(self.factors, target, len(self.order)):
            return RowAssignment(target, self.order)
        axes = [*sorted(self.factors, reverse=True), *sorted(target - self.factors, reverse=True)]
        wanted = [*sorted(target, reverse=True), *sorted(self.factors - target, reverse=True)]
        grid = torch.tensor(self.order).view([axis.size for axis in axes] + [-1])
        grid = grid.permute([axes.index(axis) for axis in wanted] + [len(axes)])
        return RowAssignment(target, tuple(grid.flatten().tolist()))


class RowAssignments:
    """The rows that each rank of a stage holds at each of its layers."""

    def __init__(self, divided: Sequence[Factors], rows: int) -> None:
        """``divided``: by which factors at each of the stage's layers; ``rows``: of the micro-batch."""
        self.rows = rows
        at = [RowAssignment(divided[0], tuple(range(rows)))]
        for factors in divided[1:]:
            at.append(at[-1] if factors == at[-1].factors else at[-1].changed(factors))
        self.at: tuple[RowAssignment, ...] = tuple(at)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One direction of a change of layout, on this rank: slice, gather, slice."""

    before: tuple[int, int]
    """Which part of the rows is kept before the gather, of how many."""
    group: ProcessGroup | None
    after: tuple[int, int]

    def __call__(self, rows: Tensor) -> Tensor:
        rows = _part(rows, *self.before)
        if self.group is not None:
            rows = collectives.all_gather(rows, self.group)
        return _part(rows, *self.after)


def _part(rows: Tensor, number: int, parts: int) -> Tensor:
    each = rows.shape[0] // parts
    return rows[number * each : (number + 1) * each]


class RowChange:
    """From one division of the rows to another, with gradients."""

    def __init__(self, pool: GroupPool, position: Position, rows: int, source: Layout, target: Layout) -> None:
        """``rows``: of the micro-batch."""
        self.free = source.rows == target.rows
        if self.free:
            return
        groups = change_groups(position, rows, source, target)
        self.forward = _step(position, rows, source.rows, target.rows, pool.group(groups.forward_rows))
        self.backward = _step(position, rows, target.rows, source.rows, pool.group(groups.backward_rows))

    def __call__(self, rows: Tensor) -> Tensor:
        if self.free:
            return rows
        changed: Tensor = _SliceGather.apply(rows, self)
        return changed


def _step(position: Position, rows: int, source: Factors, target: Factors, group: ProcessGroup | None) -> _Step:
    sliced = (target - source, frozenset()) if factor_by_factor(source, target, rows) else (frozenset(), target)
    before, after = ((coordinate(position.index, factors), degree_of(factors)) for factors in sliced)
    return _Step(before=before, group=group, after=after)


class _SliceGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, change: RowChange) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.change = change
        changed = change.forward(rows)
        # A slice that is a view would keep all the rows alive for as long as backward needs it.
        return changed if changed.untyped_storage().nbytes() == changed.nbytes else changed.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.change.backward(gradient.contiguous()), None


class LayoutChange:
    """From one layout to another, with gradients."""

    def __init__(self, pool: GroupPool, position: Position, rows: int, source: Layout, target: Layout) -> None:
        """``rows``: of the micro-batch."""
        groups = change_groups(position, rows, source, target)
        change = sequence_change(source, target)
        self._gather = pool.group(groups.whole_sequence)
        self._before = _order(position, source, change.kept, groups.whole_sequence)
        self._rows = RowChange(pool, position, rows, source, target)
        self._slice = pool.group(groups.divided_sequence)
        self._after = _order(position, target, change.kept, groups.divided_sequence)

    def __call__(self, activations: Activations) -> Activations:
        return tuple(self._changed(tensor) for tensor in activations)

    def _changed(self, tensor: Tensor) -> Tensor:
        if self._gather is not None:
            tensor = self._before.joined(operators.gather_sequence(tensor, self._gather))
        tensor = self._rows(tensor)
        if self._slice is not None:
            tensor = operators.slice_sequence(self._after.parted(tensor), self._slice)
        return tensor


def _order(position: Position, layout: Layout, kept: Iterable[Factor], group: GroupKey) -> TokenOrder:
    members = (position.ranks.index(rank) for rank in group.ranks)
    return TokenOrder(layout, part_under(layout, kept), position.index, members)
