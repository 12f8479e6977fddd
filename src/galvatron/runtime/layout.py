"""Which rows of a micro-batch a rank holds, and Slice-Gather between layers that differ (paper Section 4).

The rows are seen as a grid with one axis for each digit of the rank that any layer of the stage divides them by, and
one more for the rest. A layout is the set of digits whose axes are divided, so that going from A to B slices B∖A, which
sends nothing, and all-gathers A∖B: the least volume there is. Backward of A→B is forward of B→A, because each rank
holds the gradient of the whole loss by its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.runtime import collectives
from galvatron.runtime.groups import GroupPool, Position, spell
from galvatron.spec import Digit, Layout, lines_up

__all__ = ["Change", "Grid"]


class Grid:
    """The axes of a stage's micro-batch."""

    def __init__(self, layouts: Iterable[Layout], rows: int) -> None:
        """``layouts``: those of the stage's layers; ``rows``: of the micro-batch."""
        layouts = set(layouts)
        digits: set[Digit] = set().union(*layouts)
        self.rows = rows
        self.axes: tuple[Digit, ...] = tuple(sorted(digits, reverse=True))
        self.fits = rows % math.prod(axis.radix for axis in self.axes) == 0 and all(
            lines_up(first, second) for first in layouts for second in layouts
        )
        """Whether each digit can have an axis of its own. If not (too few rows, or ranks written in two mixed radices),
        layouts are plain chunks, and changing between them gathers the source whole."""

    def numbers(self, layout: Layout, index: int) -> Tensor:
        """The row numbers that rank ``index`` of the stage holds, in its order."""
        return self.take(torch.arange(self.rows), layout, index)

    def take(self, whole: Tensor, layout: Layout, index: int) -> Tensor:
        """The rows of a whole micro-batch that rank ``index`` of the stage holds."""
        if not self.fits:
            parts = math.prod(digit.radix for digit in layout)
            return whole.tensor_split(parts)[spell(index, layout)]
        return _select(whole, self.axes, layout, index)

    def gathered(self, source: Layout, target: Layout) -> Layout:
        """The digits that an all-gather spans when rows go from one layout to another."""
        if source == target:
            return frozenset()
        return source - target if self.fits else source

    def ordered(self, layout: Layout) -> list[Digit]:
        return [axis for axis in self.axes if axis in layout]


def _select(rows: Tensor, axes: Iterable[Digit], chosen: Layout, index: int) -> Tensor:
    """View rows as a grid of ``axes`` and keep this rank's slice of the chosen ones."""
    axes = list(axes)
    if not chosen:
        return rows
    tail = rows.shape[1:]
    grid = rows.reshape([axis.radix for axis in axes] + [-1, *tail])
    for dim, axis in reversed(list(enumerate(axes))):
        if axis in chosen:
            grid = grid.select(dim, index // axis.stride % axis.radix)
    return grid.reshape(-1, *tail)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One direction of a change of layout, on this rank."""

    grid: Grid
    source: Layout
    target: Layout
    index: int
    group: ProcessGroup | None

    def __call__(self, rows: Tensor) -> Tensor:
        if not self.grid.fits:
            whole = collectives.all_gather(rows, self.group) if self.group is not None else rows
            return self.grid.take(whole, self.target, self.index)
        held = [axis for axis in self.grid.axes if axis not in self.source]
        rows = _select(rows, held, self.target - self.source, self.index)
        if self.group is None:
            return rows
        gathered = self.grid.ordered(self.source - self.target)
        kept = [axis for axis in held if axis not in self.target]
        order = gathered + kept
        wanted = [axis for axis in self.grid.axes if axis in order]
        tail = rows.shape[1:]
        grid = collectives.all_gather(rows, self.group).view([axis.radix for axis in order] + [-1, *tail])
        if order != wanted:
            dims = [order.index(axis) for axis in wanted]
            grid = grid.permute(*dims, *range(len(order), grid.ndim))
        return grid.reshape(-1, *tail)


class Change:
    """From one layout to another, with gradients."""

    def __init__(self, pool: GroupPool, position: Position, grid: Grid, source: Layout, target: Layout) -> None:
        self.free = source == target
        if self.free:
            return
        self.forward = self._step(pool, position, grid, source, target)
        self.backward = self._step(pool, position, grid, target, source)

    @staticmethod
    def _step(pool: GroupPool, position: Position, grid: Grid, source: Layout, target: Layout) -> _Step:
        group = pool.along(position, grid.gathered(source, target))
        return _Step(grid=grid, source=source, target=target, index=position.index, group=group)

    def __call__(self, rows: Tensor) -> Tensor:
        if self.free:
            return rows
        changed: Tensor = _SliceGather.apply(rows, self)
        return changed


class _SliceGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, change: Change) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.change = change
        changed = change.forward(rows)
        # A slice that is a view would keep all the rows alive for as long as backward needs it.
        return (
            changed.clone()
            if changed.data_ptr() and changed.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
            else changed
        )

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.change.backward(gradient.contiguous()), None
