"""Which part of a parameter a rank holds, in the coordinates of the whole: what initialises, gathers and saves it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

__all__ = ["ParameterShard", "ShardBlock", "TensorSplit", "part_of"]


def part_of(size: int, index: int, degree: int) -> range:
    """The ``index``-th of ``degree`` parts, all of one size but the last ones where it does not divide."""
    each = -(-size // degree)
    return range(min(index * each, size), min((index + 1) * each, size))


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """A part of a shard that is one block in the whole as well, which is what files and messages can name."""

    offsets: tuple[int, ...]
    """Where it begins in the whole."""
    inside: tuple[int, ...]
    """Where it begins in the shard."""
    sizes: tuple[int, ...]

    def of(self, shard: Tensor) -> Tensor:
        """The view of it in the shard's tensor."""
        return shard[tuple(slice(start, start + size) for start, size in zip(self.inside, self.sizes, strict=True))]

    def in_whole(self, whole: Tensor) -> Tensor:
        """The view of it in the whole tensor."""
        return whole[tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))]


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """How tensor parallelism divides a parameter along a dim, or expert parallelism along the first."""

    dim: int
    index: int
    degree: int
    parts: int = 1
    """Weights fused side by side along the dim, each divided by itself."""

    def positions(self, size: int) -> Tensor:
        """Positions along the dim of the whole that this rank holds."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.runs(size)])

    def runs(self, size: int) -> list[range]:
        """The same as ranges, one for each of the fused weights."""
        each = size // self.parts
        chosen = part_of(each, self.index, self.degree)
        return [range(chosen.start + part * each, chosen.stop + part * each) for part in range(self.parts)]


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """A rank's part of a parameter: what tensor and expert parallelism leave of it, and of that the rows sharding
    leaves."""

    shape: tuple[int, ...]
    """Of the whole."""
    splits: tuple[TensorSplit, ...] = ()
    """Each along a dim of its own."""
    rows: range | None = None
    """Of the first dim after the splits; None: all."""

    @property
    def size(self) -> tuple[int, ...]:
        """Of this rank's part."""
        size = list(self.shape)
        for split in self.splits:
            size[split.dim] = sum(map(len, split.runs(self.shape[split.dim])))
        if self.rows is not None:
            size[0] = len(self.rows)
        return tuple(size)

    @property
    def numel(self) -> int:
        """How many numbers that has."""
        return math.prod(self.size)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.size == self.shape

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole."""
        for split in self.splits:
            whole = whole.index_select(split.dim, split.positions(self.shape[split.dim]).to(whole.device))
        return whole if self.rows is None else whole[self.rows.start : self.rows.stop]

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write this rank's part into the whole."""
        for block in self.blocks():
            block.in_whole(whole).copy_(block.of(part))

    def blocks(self) -> list[ShardBlock]:
        """The shard as blocks of the whole, in order; none if it is empty."""
        along = [[(0, range(size))] for size in self.shape]
        for split in self.splits:
            along[split.dim] = _placed(split.runs(self.shape[split.dim]))
        if self.rows is not None:
            along[0] = [
                (max(start, self.rows.start) - self.rows.start, kept)
                for start, run in along[0]
                if (kept := run[max(self.rows.start - start, 0) : max(self.rows.stop - start, 0)])
            ]
        blocks = (
            ShardBlock(
                offsets=tuple(run.start for _, run in runs),
                inside=tuple(start for start, _ in runs),
                sizes=tuple(len(run) for _, run in runs),
            )
            for runs in product(*along)
        )
        return [block for block in blocks if all(block.sizes)]


def _placed(runs: list[range]) -> list[tuple[int, range]]:
    """Runs side by side, each with where it begins."""
    placed, start = [], 0
    for run in runs:
        placed.append((start, run))
        start += len(run)
    return placed
