"""Random batches of images and text: one image a sample, among random tokens.

What a model takes beside ``pixel_values``, and how many tokens an image becomes, is found by calling its own
``get_image_features`` with stand-ins for all modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedConfig

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.families.adapters import sides
from galvatron.families.generic.images import PIXELS, image_token
from galvatron.families.generic.stubs import StubbedModel, find_units
from galvatron.families.layer import IGNORED

__all__ = ["example_of", "image_and_text", "takes_images"]

_SIDE = 224
"""Pixels of an image's side if neither user nor configuration says."""
_LEAST_TEXT = 8
_MOST_TILES = 6


def takes_images(model: Any) -> bool:
    """Whether it is a stock model of images and text with a vision tower of which we can make batches."""
    config = getattr(model, "config", None)
    if not type(model).__module__.startswith("transformers.") or not hasattr(model, "get_image_features"):
        return False
    taken = inspect.signature(model.forward).parameters
    decodes = getattr(config, "is_encoder_decoder", False)
    return {"input_ids", PIXELS, "labels"} <= taken.keys() and image_token(config) is not None and not decodes


@dataclass(frozen=True, slots=True)
class _Images:
    """Images of a batch as a model takes them."""

    inputs: dict[str, Tensor]
    tokens: int
    """Of one image."""


def image_and_text(
    model: Any, rows: int, length: int | None, generator: torch.Generator, size: int | None = None
) -> dict[str, Tensor]:
    """Inputs and labels: an image of ``size`` pixels a side in each sample of ``length`` tokens (None: a few more than
    the image's)."""
    images = _images(model, rows, size, generator)
    config, device = model.config, generator.device
    taken = inspect.signature(model.forward).parameters
    token = image_token(config)
    assert token is not None
    length = images.tokens + _LEAST_TEXT if length is None else length
    if length < images.tokens + 4:
        raise InvalidInput(
            f"a sample of {length} tokens has no room for an image, which takes {images.tokens} tokens; give more "
            "(--sequence-length), or smaller images (--image-size)"
        )
    vocabulary = config.get_text_config().vocab_size
    special = torch.tensor(sorted({own for own in _special(config) if own < vocabulary}), device=device)
    ids = torch.randint(vocabulary, (rows, length), generator=generator, device=device)
    plain = next(own for own in range(3, vocabulary) if own not in special)
    ids = torch.where(torch.isin(ids, special), plain, ids)
    ids[:, 2 : 2 + images.tokens] = token
    for name, place in (("vision_start_token_id", 1), ("vision_end_token_id", 2 + images.tokens)):
        around = getattr(config, name, None)
        if isinstance(around, int) and around < vocabulary:
            ids[:, place] = around
    seen = ids == token
    kinds = {name: seen.long() for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
    return {"input_ids": ids, **kinds, **images.inputs, "labels": ids.masked_fill(seen, IGNORED)}


def example_of(model: Any, training: Training) -> dict[str, Tensor] | None:
    """What a model is planned for that is planned for images; None: it is not."""
    if training.image_size is None:
        return None
    if not takes_images(model):
        raise InvalidInput(
            f"{type(model).__name__}: image_size {training.image_size} given, but it is no model of images and text "
            "of which batches can be made; leave it out, or give an example batch with images"
        )
    generator = torch.Generator().manual_seed(0)
    return image_and_text(model, 2, training.sequence_length, generator, training.image_size)


def _special(config: Any) -> Iterator[int]:
    """All tokens that a configuration names."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _special(value)
        elif isinstance(value, int) and ("token_id" in name or "token_index" in name):
            yield value


def _images(model: Any, rows: int, size: int | None, generator: torch.Generator) -> _Images:
    lists = tuple(name for name, own in model.named_modules() if isinstance(own, nn.ModuleList) and len(own) > 1)
    outer = tuple(name for name in lists if not any(name.startswith(f"{other}.") for other in lists))
    reasons: list[str] = []
    # One image shows it. Blocks pass on what they are given where that will do: attention to many patches takes long.
    for left_out, (number, inputs) in product((outer, ()), enumerate(_tries(model, 1, size, generator))):
        stubbed = StubbedModel(model, left_out, find_units(model, left_out))
        stubbed.on_block = lambda call: next(iter(call.arguments.values()))
        given = {name: own.cpu() for name, own in inputs.items()}
        try:
            with torch.no_grad():
                made = stubbed.call("get_image_features", given, torch.float32)
            tokens = _features(made, model.config.get_text_config().hidden_size)
        except Exception as error:  # of whatever kind: it comes from the stock model's own code
            reasons.append(f"{list(inputs[PIXELS].shape)}: {str(error).strip().partition(chr(10))[0]}")
            continue
        if tokens:
            return _Images(list(_tries(model, rows, size, generator))[number], tokens)
    raise InvalidInput(
        f"{type(model).__name__}: how it takes images is not known ({reasons[0] if reasons else 'no size'}); give an "
        "example batch with images"
    )


def _features(made: Any, width: int) -> int:
    """How many tokens' worth of features there are."""
    found = getattr(made, "pooler_output", made)
    tensors = [own for own in tree_flatten(found)[0] if isinstance(own, Tensor)]
    if not tensors or any(own.shape[-1] != width for own in tensors):
        raise ValueError("its get_image_features returns something else than embedded tokens")
    return sum(own.numel() for own in tensors) // width


def _tries(model: Any, rows: int, size: int | None, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Forms in which models take an image a sample."""
    vision: Any = getattr(model.config, "vision_config", None) or model.config
    taken = inspect.signature(model.get_image_features).parameters
    patch = getattr(vision, "patch_size", None)
    patch = patch if isinstance(patch, int) else 1
    channels = next(
        (own for name in ("num_channels", "in_channels", "in_chans") if (own := getattr(vision, name, None))), 3
    )

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    if "image_grid_thw" in taken:
        merge = getattr(vision, "spatial_merge_size", None) or 1
        side = max((size or _SIDE) // (patch * merge), 1) * merge
        cells, frames = side * side * rows, getattr(vision, "temporal_patch_size", None) or 1
        grid = torch.tensor([[1, side, side]] * rows, device=generator.device)
        for shape in ((cells, channels * frames * patch * patch), (cells, channels, patch, patch)):
            yield {PIXELS: draw(*shape), "image_grid_thw": grid}
        return
    height, width = sides(size or getattr(vision, "image_size", None) or _SIDE)
    image = (channels, max(height // patch, 1) * patch, max(width // patch, 1) * patch)
    sizes = {"image_sizes": torch.tensor([image[1:]] * rows, device=generator.device)} if "image_sizes" in taken else {}
    yield {PIXELS: draw(rows, *image)}
    if sizes:
        yield {PIXELS: draw(rows, *image), **sizes}
    yield {PIXELS: draw(rows, 1, *image)}
    for tiles in range(2, _MOST_TILES + 1) if sizes else ():
        yield {PIXELS: draw(rows, tiles, *image), **sizes}
