"""A batch as one rank sees it: of each micro-batch, the tensors its stage's layers read, in the rows they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import Batch, LayeredModel
from galvatron.runtime.layout.slice_gather import RowAssignments
from galvatron.runtime.same_batches import BatchFigures, figures_of
from galvatron.runtime.settings import ComputeSettings

__all__ = ["LocalBatch", "MicroBatch", "Reader"]


class MicroBatch:
    """One micro-batch's inputs on this rank."""

    def __init__(self, layered: LayeredModel, rows: Sequence[Batch], dtype: torch.dtype) -> None:
        """``rows``: by the number of the assignment."""
        self._layered, self._rows, self._dtype = layered, rows, dtype
        self._contexts: dict[int, Any] = {}

    def context(self, assignment: int) -> Any:
        """What layers that hold the same rows share (masks, positions); made on first use."""
        if assignment not in self._contexts:
            self._contexts[assignment] = self._layered.context(self._rows[assignment], self._dtype)
        return self._contexts[assignment]

    def release(self) -> None:
        """Let go of masks and positions after backward."""
        self._contexts.clear()


class LocalBatch:
    """This rank's part of one batch."""

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        targets: int,
        shapes: dict[str, tuple[int, ...]],
        figures: BatchFigures | None = None,
    ) -> None:
        self.micro_batches = micro_batches
        self.targets = targets
        """Of the whole batch."""
        self.shapes = shapes
        """Of one sample of each input."""
        self.figures = figures
        """By which the whole batch is compared with that of other ranks, where it is to be."""


class Reader:
    """Cuts whole batches for one rank."""

    def __init__(
        self,
        layered: LayeredModel,
        needs: Sequence[frozenset[str]],
        assignments: RowAssignments,
        index: int,
        *,
        micro_batches: int,
        settings: ComputeSettings,
    ) -> None:
        """``needs``: names of the inputs that this stage's layers of each distinct assignment read; ``index``: of the
        rank in its stage."""
        self._layered, self._needs, self._assignments, self._index = layered, needs, assignments, index
        self._micro_batches, self._device, self._dtype = micro_batches, settings.device, settings.dtype

    def local(self, batch: Batch, *, compared: bool = False) -> LocalBatch:
        """This rank's part of a whole batch; all ranks are given the same one. ``compared``: see whether they were."""
        expected = self._assignments.rows * self._micro_batches
        batch = self._layered.by_rows(batch)
        for name, tensor in batch.items():
            if not isinstance(tensor, Tensor) or not tensor.ndim or tensor.shape[0] != expected:
                given = f"{tensor.shape[0]} rows" if isinstance(tensor, Tensor) and tensor.ndim else repr(tensor)
                raise InvalidInput(
                    f"batch: {name!r} has {given}; the plan trains batches of {expected} samples "
                    f"({self._micro_batches} micro-batches of {self._assignments.rows}), the same on every rank"
                )
        missing = self._layered.required - batch.keys()
        if missing:
            raise InvalidInput(
                f"batch: {', '.join(sorted(missing))} missing; it has {', '.join(sorted(batch)) or 'nothing'}"
            )
        parts = [self._part(batch, number) for number in range(self._micro_batches)]
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in batch.items()}
        figures = figures_of(batch, self.rows_read()) if compared else None
        return LocalBatch(parts, self._layered.targets(batch), shapes, figures)

    def rows_read(self) -> dict[str, frozenset[int]]:
        """Of each input but the labels, which all ranks count, the rows of a whole batch that this rank reads."""
        rows: dict[str, set[int]] = {name: set() for name in self._layered.required - {"labels"}}
        count = self._assignments.rows
        firsts = range(0, self._micro_batches * count, count)
        for assignment, names in zip(self._assignments.distinct, self._needs, strict=True):
            own = assignment.numbers(self._index)
            for name in names & rows.keys():
                rows[name].update(first + row for first in firsts for row in own)
        return {name: frozenset(numbers) for name, numbers in rows.items()}

    def _part(self, batch: Batch, number: int) -> MicroBatch:
        count = self._assignments.rows
        whole = {name: tensor[number * count : (number + 1) * count] for name, tensor in batch.items()}
        rows = [
            {
                name: assignment.take(whole[name], self._index).to(self._device, non_blocking=True)
                for name in names & batch.keys()
            }
            for assignment, names in zip(self._assignments.distinct, self._needs, strict=True)
        ]
        return MicroBatch(self._layered, rows, self._dtype)
