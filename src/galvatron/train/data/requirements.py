"""What a model's configuration says about its data: which objective, which sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.families.adapters import sides
from galvatron.families.build import read_config, stock_class

__all__ = ["ImageRequirements", "Objective", "TokenRequirements", "requirements_of"]


class Objective(StrEnum):
    """What a language model is trained to predict."""

    CAUSAL = "causal"
    """Each next token (GPT-2, Llama)."""
    MASKED = "masked"
    """Hidden tokens (BERT)."""
    SPANS = "spans"
    """Hidden runs of tokens, as a sequence of their own (T5)."""


_OBJECTIVES = {
    "LMHeadModel": Objective.CAUSAL,
    "ForCausalLM": Objective.CAUSAL,
    "ForMaskedLM": Objective.MASKED,
    "ForConditionalGeneration": Objective.SPANS,
}
"""By how the stock class's name ends."""
_T5_END = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRequirements:
    """What a language model reads."""

    objective: Objective
    vocabulary: int
    """Words the model knows; token ids are below it."""
    length: int
    """Tokens of a sample."""
    end: int
    """The id that ends a sequence where no tokenizer says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequirements:
    """What an image classifier reads."""

    height: int
    width: int
    channels: int
    classes: int


def requirements_of(config: Mapping[str, Any], training: Training) -> TokenRequirements | ImageRequirements:
    """What the model of this configuration (the content of a ``config.json``) reads."""
    full: Any = read_config(config)
    name = stock_class(full).__name__
    if training.image_tokens is not None:
        raise InvalidInput(
            f"{name}: the plan is for images beside text, of which no data is made; write the training loop yourself "
            "and give forward_backward your own batches, or plan without --image-size"
        )
    if name.endswith("ForImageClassification"):
        height, width = sides(full.image_size)
        return ImageRequirements(height=height, width=width, channels=full.num_channels, classes=full.num_labels)
    objective = next((found for ending, found in _OBJECTIVES.items() if name.endswith(ending)), None)
    if objective is Objective.SPANS and not getattr(full, "is_encoder_decoder", False):
        objective, full = Objective.CAUSAL, full.get_text_config()  # a language model behind a vision tower
    if objective is None:
        raise InvalidInput(
            f"{name}: no data is made for models of this kind (known: language models and image classifiers); write "
            "the training loop yourself and give forward_backward your own batches"
        )
    length = training.sequence_length or getattr(full, "max_position_embeddings", None)
    if length is None:
        raise InvalidInput(f"{name}: its configuration does not say how long samples are; give a sequence length")
    end = full.eos_token_id if isinstance(full.eos_token_id, int) else _T5_END
    return TokenRequirements(objective=objective, vocabulary=full.vocab_size, length=length, end=end)
