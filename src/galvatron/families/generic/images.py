"""Batches with images: which of their tensors list images or patches instead of samples, and how those are divided.

Hugging Face's models of images and text take the images of all samples in one list (``pixel_values``, one entry an
image, or one a patch beside ``image_grid_thw``). Which entries are whose follows from the placeholders among a sample's
tokens. Here such a batch is put *by rows*: samples first in every tensor, padded to the most that a sample has; and
back into the form that the model takes. A batch of which it is not certain which image is whose is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import Batch

__all__ = ["IMAGES", "PIXELS", "ImageRows", "image_token", "padded", "unpadded"]

PIXELS, _GRID, _SIZES = "pixel_values", "image_grid_thw", "image_sizes"
IMAGES = "images_of_rows"
"""In a batch by rows: how many entries of the lists of images each sample has."""
_UNKNOWN = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "input_features", "input_features_mask")


def image_token(config: Any) -> int | None:
    """The token that stands for a part of an image; None: the configuration names none."""
    for name in ("image_token_id", "image_token_index", "media_placeholder_token_id"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return None


class ImageRows:
    """Divides the images of a model's batches by samples."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = getattr(model, "config", None)
        self._name = type(model).__name__
        self._token = image_token(config)
        vision: Any = getattr(config, "vision_config", None)
        self._merge: int = getattr(vision, "spatial_merge_size", None) or 1

    def by_rows(self, batch: Batch) -> Batch:
        """The batch with samples first in each tensor; itself where it has no lists of images, or is so already."""
        if PIXELS not in batch or IMAGES in batch or "input_ids" not in batch:
            return batch
        unknown = next((name for name in _UNKNOWN if name in batch), None)
        if unknown is not None:
            raise InvalidInput(
                f"batch: {unknown!r}: videos and sounds beside images are not divided over samples; train on images "
                "and text"
            )
        lists = {name: own for name, own in batch.items() if _lists_images(name)}
        if _GRID in batch:
            return {**batch, **self._grids(batch, lists)}
        if self._token is None or (batch[PIXELS].ndim > 4 and _SIZES not in batch):
            return batch  # rows first, as the model itself takes it; else the reader says so
        counts = self._counts(batch)
        rows = {name: padded(own, counts, max(counts)) for name, own in lists.items()}
        return {**batch, **rows, IMAGES: torch.tensor(counts)}

    def as_lists(self, batch: Batch) -> Batch:
        """The batch as the model takes it."""
        if IMAGES not in batch:
            return batch
        found = {name: own for name, own in batch.items() if name != IMAGES and not _lists_images(name)}
        counts = [int(own) for own in batch[IMAGES].tolist()]
        if not any(counts):  # samples without images are text to the model, whose positions may still follow grids
            return {**found, _GRID: batch[_GRID][0, :0]} if _GRID in batch else found
        for name in filter(_lists_images, batch):
            found[name] = unpadded(batch[name], self.entries(batch) if name == PIXELS else counts)
        return found

    def entries(self, batch: Batch) -> list[int]:
        """Of a batch by rows: how many entries of ``pixel_values`` each sample has."""
        if IMAGES not in batch:
            return [1] * len(batch[PIXELS])
        return _cells(batch[_GRID]) if _GRID in batch else [int(own) for own in batch[IMAGES].tolist()]

    def end(self, batch: Batch) -> int:
        """How many tokens of the longest sample its images end after; 0: there are none."""
        if PIXELS not in batch or "input_ids" not in batch or self._token is None:
            return 0
        places = (batch["input_ids"] == self._token).any(0).nonzero()
        return int(places.max()) + 1 if len(places) else 0

    def _counts(self, batch: Batch) -> list[int]:
        """How many images each sample has, of a list of images. Where a batch says nothing else of them, all make
        equally many tokens."""
        images = len(batch[PIXELS])
        tokens = self._tokens(batch)
        if images == len(tokens) and all(tokens):
            return [1] * images  # each has at least one, so each has one
        total = sum(tokens)
        each = total // images if images else 0
        shape = batch["input_ids"].shape
        alike = all(own.shape == shape for name, own in batch.items() if name not in (PIXELS, "labels"))
        if not alike or not each or total % images or any(own % each for own in tokens):
            raise InvalidInput(
                f"batch: {PIXELS} has {images} images for samples with {_short(tokens)} image tokens, from which it "
                "cannot be told which image is whose; give batches in which each sample has one image"
            )
        return [own // each for own in tokens]

    def _grids(self, batch: Batch, lists: dict[str, Tensor]) -> dict[str, Tensor]:
        """Images of several sizes, as lists of patches."""
        cells = [int(own) for own in batch[_GRID].prod(-1).tolist()]
        if len(batch[PIXELS]) != sum(cells):
            raise InvalidInput(
                f"batch: {PIXELS} has {len(batch[PIXELS])} patches, {_GRID} says {sum(cells)}; they must be equal"
            )
        counts, first = [], 0
        for row, tokens in enumerate(self._tokens(batch)):
            last, found = first, 0
            while found < tokens and last < len(cells):
                found, last = found + cells[last] // self._merge**2, last + 1
            if found != tokens:
                raise InvalidInput(
                    f"batch: sample {row} has {tokens} image tokens, but its images ({_GRID}) make {found}; each image "
                    f"has a token for {self._merge**2} of its patches"
                )
            counts.append(last - first)
            first = last
        if first != len(cells):
            raise InvalidInput(f"batch: {_GRID} has {len(cells)} images, but the image tokens are those of {first}")
        packed = {name: padded(own, counts, max(counts)) for name, own in lists.items() if name != PIXELS}
        patches = _cells(packed[_GRID])
        packed[PIXELS] = padded(batch[PIXELS], patches, max(patches))
        return {**packed, IMAGES: torch.tensor(counts)}

    def _tokens(self, batch: Batch) -> list[int]:
        if self._token is None:
            raise InvalidInput(
                f"batch: {self._name} does not say which token stands for an image (image_token_id), so its {PIXELS} "
                "cannot be divided over samples"
            )
        found: list[int] = (batch["input_ids"] == self._token).sum(-1).tolist()
        return found


def _lists_images(name: str) -> bool:
    return name.startswith(("pixel_", "image_"))


def _cells(grids: Tensor) -> list[int]:
    """Patches of each sample; padding has none."""
    return [int(own) for own in grids.prod(-1).sum(-1).tolist()]


def padded(entries: Tensor, counts: Sequence[int], most: int) -> Tensor:
    """From a list of entries to (samples, the most that one has, …)."""
    if len(entries) != sum(counts):
        raise InvalidInput(f"batch: a list of images has {len(entries)} entries; expected {sum(counts)}")
    if all(own == most for own in counts):
        return entries.reshape(len(counts), most, *entries.shape[1:])
    found = entries.new_zeros((len(counts) * most, *entries.shape[1:]))
    found = found.index_copy(0, _places(counts, most).to(entries.device), entries)
    return found.view(len(counts), most, *entries.shape[1:])


def unpadded(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Back to a list."""
    if all(own == rows.shape[1] for own in counts):
        return rows.flatten(0, 1)
    return rows.flatten(0, 1).index_select(0, _places(counts, rows.shape[1]).to(rows.device))


def _places(counts: Sequence[int], most: int) -> Tensor:
    return torch.cat([torch.arange(own) + row * most for row, own in enumerate(counts)])


def _short(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
