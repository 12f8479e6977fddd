"""What several families have in common: masks and positions of whole sequences, targets, random batches.

Knows Hugging Face's mask helpers; every mask is made by the function the stock model itself calls.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from galvatron.core.errors import InvalidInput
from galvatron.families.context import mask_given
from galvatron.families.given import refuse_own_loss
from galvatron.families.layer import IGNORED, Activations, Batch, CrossEntropy, Layer, LayeredModel

__all__ = [
    "ClassHead",
    "ImageContext",
    "ImageModel",
    "TokenContext",
    "bidirectional_mask",
    "causal_mask",
    "count_targets",
    "masked_labels",
    "random_tokens",
    "require",
    "shape_of",
    "sides",
    "stock_children",
]

_MASKED = 0.15
"""Share of the tokens that a masked language model predicts."""


def stock_children(name: str, module: nn.Module, *attributes: str) -> dict[str, tuple[str, nn.Module]]:
    """Some children of a stock module in the form that :class:`Layer` takes, under their own names."""
    return {attribute: (f"{name}.{attribute}", getattr(module, attribute)) for attribute in attributes}


def shape_of(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """A stand-in for the embeddings of these tokens: the mask helpers look at shape, dtype and device only."""
    return torch.empty((), dtype=dtype, device=ids.device).expand(*ids.shape, 1)


def bidirectional_mask(
    config: Any, ids: Tensor, dtype: torch.dtype, padding: Tensor | None, keys: Tensor | None = None
) -> Any:
    """What each token attends to if all see all: nothing to mask without padding. ``keys``: the tokens attended to."""
    divided = mask_given()
    if divided is not None:
        return divided
    attended = None if keys is None else shape_of(keys, dtype)
    return create_bidirectional_mask(config, shape_of(ids, dtype), padding, encoder_hidden_states=attended)


def causal_mask(config: Any, ids: Tensor, dtype: torch.dtype, padding: Tensor | None, positions: Tensor | None) -> Any:
    """What each token attends to if it sees those before it; None where the attention kernel masks by itself.

    Positions that start anew in a row mean several samples packed into it; without any there is no need to look.
    """
    divided = mask_given()
    if divided is not None:
        return divided
    return create_causal_mask(config, shape_of(ids, dtype), padding, past_key_values=None, position_ids=positions)


def count_targets(labels: Tensor) -> int:
    """How many labels, which are numbers of classes, count."""
    if labels.is_floating_point():
        raise InvalidInput(
            f"batch: labels are {labels.dtype} of shape {list(labels.shape)}; expected numbers of classes: for another "
            "loss describe the model with such labels (galvatron.describe), and give parallelize the loss (loss=)"
        )
    return int((labels != IGNORED).sum())


def random_tokens(rows: int, length: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Random tokens."""
    return torch.randint(vocabulary, (rows, length), generator=generator, device=generator.device)


def masked_labels(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Labels of which some count, as in BERT's pre-training; the first of each row always."""
    drawn = torch.rand(labels.shape, generator=generator, device=labels.device) < _MASKED
    drawn[:, 0] = True
    return torch.where(drawn, labels, IGNORED)


def require(model: nn.Module, fits: bool, field: str, expected: str) -> None:
    """Refuse a configuration that the family's layers would compute wrongly."""
    if not fits:
        value = getattr(model.config, field, None)
        raise InvalidInput(f"{type(model).__name__}: {field} of its configuration is {value!r}; expected {expected}")


@dataclass(frozen=True, slots=True)
class TokenContext:
    """A batch of tokens and the mask that all blocks share."""

    batch: Batch
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class ImageContext:
    """Images need neither masks nor positions."""

    batch: Batch
    dtype: torch.dtype


class ClassHead(Layer):
    """Last layer of an image classifier; a family says how the logits come from the hidden state."""

    def __init__(self, modules: Mapping[str, tuple[str, nn.Module]]) -> None:
        super().__init__("head", modules)
        self.loss = CrossEntropy()

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"labels"})

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """One row of scores for each image."""

    def forward(self, activations: Activations, context: ImageContext) -> Activations:
        (hidden,) = activations
        return (self.loss(self.logits(hidden), context.batch["labels"]),)


class ImageModel(LayeredModel):
    """An image classifier: pixels in, one class for each image."""

    required = frozenset({"pixel_values", "labels"})

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        refuse_own_loss(model, "ForImageClassification")
        config = model.config
        single = config.problem_type in (None, "single_label_classification")
        require(model, config.num_labels > 1, "num_labels", "at least 2 classes")
        require(model, single, "problem_type", "'single_label_classification'")
        self.config = config

    def context(self, batch: Batch, dtype: torch.dtype) -> ImageContext:
        return ImageContext(batch, dtype)

    def targets(self, batch: Batch) -> int:
        return count_targets(batch["labels"])

    def example(self, rows: int, sequence_length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
        if sequence_length is not None:
            raise InvalidInput(f"sequence length {sequence_length}: images have none; leave it out")
        height, width = sides(self.config.image_size)
        size = (rows, self.config.num_channels, height, width)
        return {
            "pixel_values": torch.randn(size, generator=generator, device=generator.device),
            "labels": torch.randint(self.config.num_labels, (rows,), generator=generator, device=generator.device),
        }


def sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image or a patch, which configurations write as one number or two."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width
