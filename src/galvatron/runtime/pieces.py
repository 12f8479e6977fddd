"""Which part of a parameter a rank holds, in the coordinates of the whole: what initialises, gathers and saves it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cut", "Piece", "part_of"]


def part_of(size: int, index: int, degree: int) -> range:
    """The ``index``-th of ``degree`` parts, all of one size but the last ones where it does not divide."""
    each = -(-size // degree)
    return range(min(index * each, size), min((index + 1) * each, size))


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor parallelism divides a parameter."""

    dim: int
    index: int
    degree: int
    parts: int = 1
    """Weights fused side by side along the dim, each divided by itself."""

    def positions(self, size: int) -> Tensor:
        """Positions along the dim of the whole that this rank holds."""
        each = size // self.parts
        chosen = part_of(each, self.index, self.degree)
        return torch.cat([torch.arange(chosen.start, chosen.stop) + part * each for part in range(self.parts)])


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of a parameter: what tensor parallelism leaves of it, and of that the rows sharding leaves."""

    shape: tuple[int, ...]
    """Of the whole."""
    cut: Cut | None = None
    rows: range | None = None
    """Of the first dim after the cut; None: all."""

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole."""
        if self.cut is not None:
            whole = whole.index_select(self.cut.dim, self.cut.positions(self.shape[self.cut.dim]).to(whole.device))
        return whole if self.rows is None else whole[self.rows.start : self.rows.stop]

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write this rank's part into the whole."""
        if self.cut is None:
            target = whole if self.rows is None else whole[self.rows.start : self.rows.stop]
            target.copy_(part)
            return
        positions = self.cut.positions(self.shape[self.cut.dim]).to(whole.device)
        if self.rows is not None and self.cut.dim == 0:
            positions = positions[self.rows.start : self.rows.stop]
        elif self.rows is not None:
            whole = whole[self.rows.start : self.rows.stop]
        whole.index_copy_(self.cut.dim, positions, part.to(whole.dtype))
