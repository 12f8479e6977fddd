"""A batch as one rank sees it: of each micro-batch, the tensors its stage's layers read, in the rows they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron.errors import InvalidInput
from galvatron.models.layer import Batch, CutModel
from galvatron.runtime.layout import Grid
from galvatron.spec import Layout

__all__ = ["LocalBatch", "MicroBatch", "Reader"]


class MicroBatch:
    """One micro-batch's inputs on this rank."""

    def __init__(self, cut: CutModel, rows: Mapping[Layout, Batch], dtype: torch.dtype) -> None:
        self._cut, self._rows, self._dtype = cut, rows, dtype
        self._contexts: dict[Layout, Any] = {}

    def context(self, layout: Layout) -> Any:
        """What layers of this layout share (masks, positions); made on first use."""
        if layout not in self._contexts:
            self._contexts[layout] = self._cut.context(self._rows[layout], self._dtype)
        return self._contexts[layout]

    def release(self) -> None:
        """Let go of masks and positions after backward."""
        self._contexts.clear()


class LocalBatch:
    """This rank's part of one batch."""

    def __init__(self, micro_batches: Sequence[MicroBatch], targets: int, shapes: dict[str, tuple[int, ...]]) -> None:
        self.micro_batches = micro_batches
        self.targets = targets
        """Of the whole batch."""
        self.shapes = shapes
        """Of one sample of each input."""


class Reader:
    """Cuts whole batches for one rank."""

    def __init__(
        self,
        cut: CutModel,
        needs: Mapping[Layout, frozenset[str]],
        grid: Grid,
        index: int,
        *,
        micro_batches: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """``needs``: names of the inputs that this stage's layers of each layout read."""
        self._cut, self._needs, self._grid, self._index = cut, needs, grid, index
        self._micro_batches, self._device, self._dtype = micro_batches, device, dtype

    def local(self, batch: Batch) -> LocalBatch:
        """This rank's part of a whole batch; all ranks are given the same one."""
        expected = self._grid.rows * self._micro_batches
        for name, tensor in batch.items():
            if not isinstance(tensor, Tensor) or not tensor.ndim or tensor.shape[0] != expected:
                given = f"{tensor.shape[0]} rows" if isinstance(tensor, Tensor) and tensor.ndim else repr(tensor)
                raise InvalidInput(
                    f"batch: {name!r} has {given}; the plan trains batches of {expected} samples "
                    f"({self._micro_batches} micro-batches of {self._grid.rows}), the same on every rank"
                )
        missing = self._cut.required - batch.keys()
        if missing:
            raise InvalidInput(
                f"batch: {', '.join(sorted(missing))} missing; it has {', '.join(sorted(batch)) or 'nothing'}"
            )
        parts = [self._part(batch, number) for number in range(self._micro_batches)]
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in batch.items()}
        return LocalBatch(parts, self._cut.targets(batch), shapes)

    def rows_read(self) -> dict[str, frozenset[int]]:
        """Of each input but the labels, which all ranks count, the rows of a whole batch that this rank reads."""
        rows: dict[str, set[int]] = {name: set() for name in self._cut.required - {"labels"}}
        for layout, names in self._needs.items():
            own = self._grid.numbers(layout, self._index).tolist()
            firsts = range(0, self._micro_batches * self._grid.rows, self._grid.rows)
            for name in names & rows.keys():
                rows[name].update(first + row for first in firsts for row in own)
        return {name: frozenset(numbers) for name, numbers in rows.items()}

    def _part(self, batch: Batch, number: int) -> MicroBatch:
        first = number * self._grid.rows
        rows = {
            layout: {
                name: self._grid.take(batch[name][first : first + self._grid.rows], layout, self._index).to(
                    self._device, non_blocking=True
                )
                for name in names & batch.keys()
            }
            for layout, names in self._needs.items()
        }
        return MicroBatch(self._cut, rows, self._dtype)
