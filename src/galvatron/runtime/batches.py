"""A batch as one rank sees it: of each micro-batch, the tensors its stage's layers read, in the rows and tokens that
they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from galvatron.core.errors import InvalidInput
from galvatron.families.context import ContextMask, given_mask, sliced, steady_positions
from galvatron.families.layer import IGNORED, Batch, LayeredModel
from galvatron.runtime.layout.portions import Portion, Portions
from galvatron.runtime.same_batches import BatchFigures, compared_here, figures_of, mark_of
from galvatron.runtime.settings import ComputeSettings

__all__ = ["LocalBatch", "MicroBatch", "Reader"]


class MicroBatch:
    """One micro-batch's inputs on this rank."""

    def __init__(
        self, layered: LayeredModel, parts: Sequence[tuple[Batch, ContextMask | None]], dtype: torch.dtype
    ) -> None:
        """``parts``: by the number of the portion; each with the mask for its attention where it has not all tokens."""
        self._layered, self._parts, self._dtype = layered, parts, dtype
        self._contexts: dict[int, Any] = {}

    def context(self, portion: int) -> Any:
        """What layers that read the same rows and tokens share (masks, positions); made on first use."""
        if portion not in self._contexts:
            batch, mask = self._parts[portion]
            with given_mask(mask):
                self._contexts[portion] = self._layered.context(batch, self._dtype)
        return self._contexts[portion]

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
        mark: Tensor,
        figures: BatchFigures | None = None,
    ) -> None:
        self.micro_batches = micro_batches
        self.targets = targets
        """Of the whole batch."""
        self.shapes = shapes
        """Of one sample of each input."""
        self.mark = mark
        """The same on all ranks if they were given the same labels."""
        self.figures = figures
        """By which the whole batch is compared with that of other ranks, where it is to be."""


class Reader:
    """Cuts whole batches for one rank."""

    def __init__(
        self,
        layered: LayeredModel,
        needs: Sequence[frozenset[str]],
        portions: Portions,
        index: int,
        *,
        micro_batches: int,
        settings: ComputeSettings,
    ) -> None:
        """``needs``: names of the inputs that this stage's layers of each distinct portion read; ``index``: of the rank
        in its stage."""
        self._layered, self._needs, self._portions, self._index = layered, needs, portions, index
        self.context_groups: Callable[[Portion], tuple[str, str]] = _none
        """Names of the ring and of Ulysses' group that this rank is in, at layers with such a portion."""
        self.check_shapes: Callable[[tuple[tuple[str, tuple[int, ...]], ...]], None] | None = None
        """Called with the shapes of one sample of each input: raises where layers cannot be divided so."""
        stock = isinstance(getattr(layered.model, "config", None), PreTrainedConfig)
        self._steady = steady_positions(layered.model.config) if stock else None
        self._taken = frozenset[str]().union(*(layer.inputs for layer in layered.layers)) | layered.required
        self._micro_batches, self._device, self._dtype = micro_batches, settings.device, settings.dtype

    def local(self, batch: Batch, *, compared: bool = False) -> LocalBatch:
        """This rank's part of a whole batch; all ranks are given the same one. ``compared``: see whether they were."""
        expected = self._portions.rows * self._micro_batches
        batch = self._layered.by_rows(batch)
        unknown = sorted(batch.keys() - self._taken)
        if unknown:
            raise InvalidInput(
                f"batch: {', '.join(unknown)} given, which no layer reads, so that it would be ignored; expected "
                f"{', '.join(sorted(self._taken))}: leave it out"
            )
        for name, tensor in batch.items():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise InvalidInput(
                    f"batch: {name!r} requires a gradient, which no rank would have as a whole; detach it, or make "
                    "what computes it a part of the model"
                )
            if not isinstance(tensor, Tensor) or not tensor.ndim or tensor.shape[0] != expected:
                given = f"{tensor.shape[0]} rows" if isinstance(tensor, Tensor) and tensor.ndim else _kind(tensor)
                raise InvalidInput(
                    f"batch: {name!r} has {given}; the plan trains batches of {expected} samples "
                    f"({self._micro_batches} micro-batches of {self._portions.rows}), the same on every rank"
                )
        missing = self._layered.required - batch.keys()
        if missing:
            raise InvalidInput(
                f"batch: {', '.join(sorted(missing))} missing; it has {', '.join(sorted(batch)) or 'nothing'}"
            )
        tokens, labels = batch.get("input_ids"), batch.get("labels")
        if self._layered.shifts_labels and tokens is not None and labels is not None and tokens.shape != labels.shape:
            raise InvalidInput(
                f"batch: labels have shape {list(labels.shape)}, input_ids {list(tokens.shape)}; expected a label for "
                f"each token, {IGNORED} where none counts"
            )
        divided = any(len(each.rows.numbers(0)) < expected for each in self._portions.distinct)
        if self._steady is not None and divided and "position_ids" in batch:
            self._check_positions(batch["position_ids"], self._steady)
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in batch.items()}
        if self.check_shapes is not None:
            self.check_shapes(tuple(shapes.items()))
        parts = [self._part(batch, number) for number in range(self._micro_batches)]
        figures = figures_of(batch, self.rows_read()) if compared else None
        return LocalBatch(
            parts, self._layered.targets(batch), shapes, mark_of(batch) if compared_here() else torch.zeros(()), figures
        )

    @staticmethod
    def _check_positions(positions: Tensor, steady: int) -> None:
        """The stock model rotates all rows of a batch by the longest position in any of them; a rank has some rows."""
        longest = positions.flatten(1).amax(1)
        least, most = int(longest.min()), int(longest.max())
        if most >= steady and least < most:
            raise InvalidInput(
                f"batch: the last positions of its rows are {least} to {most}; above {steady - 1} the model rotates "
                "all rows by the longest of them (its rope_type), but ranks have some rows each: give rows that end at "
                "the same position, shorter ones, or no position_ids"
            )

    def rows_read(self) -> dict[str, frozenset[int]]:
        """Of each input but the labels, which all ranks count, the rows of a whole batch that this rank reads."""
        rows: dict[str, set[int]] = {name: set() for name in self._layered.required - {"labels"}}
        count = self._portions.rows
        firsts = range(0, self._micro_batches * count, count)
        for portion, names in zip(self._portions.distinct, self._needs, strict=True):
            own = portion.rows.numbers(self._index)
            for name in names & rows.keys():
                rows[name].update(first + row for first in firsts for row in own)
        return {name: frozenset(numbers) for name, numbers in rows.items()}

    def _part(self, batch: Batch, number: int) -> MicroBatch:
        count = self._portions.rows
        whole = {name: tensor[number * count : (number + 1) * count] for name, tensor in batch.items()}
        parts = []
        for portion, names in zip(self._portions.distinct, self._needs, strict=True):
            own = {name: portion.rows.take(whole[name], self._index) for name in names & batch.keys()}
            part, mask = self._sliced(own, portion)
            parts.append(({name: self._here(tensor) for name, tensor in part.items()}, mask))
        return MicroBatch(self._layered, parts, self._dtype)

    def _here(self, tensor: Tensor) -> Tensor:
        """On the rank's device. A copy from memory that the system may move waits for all that the GPU is doing."""
        if self._device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.contiguous().pin_memory()  # an expanded one has no memory of its own
        # Each part counts its changes by itself: models that mask their input in place would else spoil for backward
        # what they kept of other micro-batches.
        return tensor.to(self._device, non_blocking=True).data

    def _sliced(self, rows: Batch, portion: Portion) -> tuple[Batch, ContextMask | None]:
        """Of these rows the tokens that this rank reads, where it does not read all."""
        if portion.context is None or not rows:
            return rows, None
        tokens = portion.tokens(self._index, max(tensor.shape[1] for tensor in rows.values() if tensor.ndim > 1))
        own = self._layered
        separates = "position_ids" in rows and own.separates_documents()
        groups = self.context_groups(portion)
        return sliced(rows, tokens, groups, shifts=own.shifts_labels, separates=separates)


def _kind(given: object) -> str:
    if isinstance(given, Tensor):
        return "no rows, because it is a single number"
    return f"no rows, because it is a {type(given).__name__} and no tensor"


def _none(portion: Portion) -> tuple[str, str]:
    return "", ""
