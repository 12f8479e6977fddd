"""A batch as one rank sees it: of each micro-batch, the tensors its stage's layers read, in the rows they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import Batch, CutModel
from galvatron.runtime.layout.slice_gather import Placements

__all__ = ["LocalBatch", "MicroBatch", "Reader"]


class MicroBatch:
    """One micro-batch's inputs on this rank."""

    def __init__(self, cut: CutModel, rows: Sequence[Batch], dtype: torch.dtype) -> None:
        """``rows``: by the number of the placement."""
        self._cut, self._rows, self._dtype = cut, rows, dtype
        self._contexts: dict[int, Any] = {}

    def context(self, placement: int) -> Any:
        """What layers that hold the same rows share (masks, positions); made on first use."""
        if placement not in self._contexts:
            self._contexts[placement] = self._cut.context(self._rows[placement], self._dtype)
        return self._contexts[placement]

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
        needs: Sequence[frozenset[str]],
        placements: Placements,
        index: int,
        *,
        micro_batches: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """``needs``: names of the inputs that this stage's layers of each distinct placement read."""
        self._cut, self._needs, self._placements, self._index = cut, needs, placements, index
        self._micro_batches, self._device, self._dtype = micro_batches, device, dtype

    def local(self, batch: Batch) -> LocalBatch:
        """This rank's part of a whole batch; all ranks are given the same one."""
        expected = self._placements.rows * self._micro_batches
        for name, tensor in batch.items():
            if not isinstance(tensor, Tensor) or not tensor.ndim or tensor.shape[0] != expected:
                given = f"{tensor.shape[0]} rows" if isinstance(tensor, Tensor) and tensor.ndim else repr(tensor)
                raise InvalidInput(
                    f"batch: {name!r} has {given}; the plan trains batches of {expected} samples "
                    f"({self._micro_batches} micro-batches of {self._placements.rows}), the same on every rank"
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
        count = self._placements.rows
        firsts = range(0, self._micro_batches * count, count)
        for placement, names in zip(self._placements.distinct, self._needs, strict=True):
            own = placement.numbers(self._index)
            for name in names & rows.keys():
                rows[name].update(first + row for first in firsts for row in own)
        return {name: frozenset(numbers) for name, numbers in rows.items()}

    def _part(self, batch: Batch, number: int) -> MicroBatch:
        count = self._placements.rows
        whole = {name: tensor[number * count : (number + 1) * count] for name, tensor in batch.items()}
        rows = [
            {
                name: placement.take(whole[name], self._index).to(self._device, non_blocking=True)
                for name in names & batch.keys()
            }
            for placement, names in zip(self._placements.distinct, self._needs, strict=True)
        ]
        return MicroBatch(self._cut, rows, self._dtype)
