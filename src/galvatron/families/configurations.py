"""Where two configurations describe different models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

__all__ = ["different_fields"]

_NOT_THE_MODEL = frozenset(
    {"architectures", "dtype", "name_or_path", "output_attentions", "output_hidden_states", "return_dict"}
    | {"torch_dtype", "transformers_version", "use_cache"}
)


def different_fields(one: PreTrainedConfig, other: PreTrainedConfig) -> dict[str, tuple[Any, Any]]:
    """Fields of the first that the other has otherwise, with both values, but for what says nothing of the model."""
    ours, theirs = _of_the_model(one.to_dict()), _of_the_model(other.to_dict())
    return {key: (value, theirs.get(key)) for key, value in sorted(ours.items()) if value != theirs.get(key)}


def _of_the_model(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _of_the_model(value) if isinstance(value, Mapping) else value
        for key, value in content.items()
        if key not in _NOT_THE_MODEL and not str(key).startswith("_")
    }
