"""Random batches for models of no known family: of tokens, images or sounds, by what the configuration says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.families.adapters import masked_labels, random_tokens, sides
from galvatron.families.layer import Batch

__all__ = ["random_batch", "shortened", "takes_tokens"]

_LENGTH = 512
"""Tokens of a sample if neither user nor configuration says."""
_PIXELS = 224


def takes_tokens(model: Any) -> bool:
    """Whether a random batch is made of tokens, so many as are asked for."""
    return getattr(model, "main_input_name", None) == "input_ids"


def random_batch(model: Any, rows: int, sequence_length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
    """Inputs and labels of a stock model of Hugging Face."""
    config: Any = getattr(model, "config", None)
    match getattr(model, "main_input_name", None):
        case "input_ids":
            return _text(model, rows, sequence_length, generator)
        case "pixel_values" if hasattr(config, "num_labels") and not config.is_encoder_decoder:
            size = (rows, *_image(config))
            labels = torch.randint(config.num_labels, (rows,), generator=generator, device=generator.device)
            return {"pixel_values": torch.randn(size, generator=generator, device=generator.device), "labels": labels}
        case "input_features" if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
            return _sound(config, rows, sequence_length, generator)
    raise InvalidInput(
        f"{type(model).__name__}: what goes into it is not known; give an example batch with its inputs and labels"
    )


def _text(model: Any, rows: int, length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
    name, config = type(model).__name__, model.config.get_text_config()
    length = length or min(_LENGTH, getattr(config, "max_position_embeddings", _LENGTH))
    ids = random_tokens(rows, length, config.vocab_size, generator)
    if "Classification" in name:
        shape = ids.shape if "Token" in name else ids.shape[:1]
        return {"input_ids": ids, "labels": torch.randint(config.num_labels, shape, generator=generator)}
    if getattr(model.config, "is_encoder_decoder", False):
        return {"input_ids": ids, "labels": random_tokens(rows, length, config.vocab_size, generator)}
    if "MaskedLM" in name:
        return {"input_ids": ids, "labels": masked_labels(ids, generator)}
    return {"input_ids": ids, "labels": ids.clone()}


def _sound(config: Any, rows: int, length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
    """Spectra of two frames for each position of the encoder, and the text (Whisper)."""
    size = (rows, config.num_mel_bins, 2 * config.max_source_positions)
    most = getattr(config, "max_target_positions", _LENGTH)
    return {
        "input_features": torch.randn(size, generator=generator, device=generator.device),
        "labels": random_tokens(rows, min(length or _LENGTH, most), config.vocab_size, generator),
    }


def _image(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image; models that take any size are tried with a usual one."""
    vision = getattr(config, "vision_config", config)
    height, width = sides(getattr(vision, "image_size", _PIXELS))
    return getattr(vision, "num_channels", 3), height, width


def shortened(batch: Batch, tokens: int) -> dict[str, Tensor]:
    """A batch of tokens with at most so many a sample: what is found out by a trial depends on no more."""
    shape = batch["input_ids"].shape[:2] if "input_ids" in batch else None
    return {name: own[:, :tokens] if own.shape[:2] == shape else own for name, own in batch.items()}
