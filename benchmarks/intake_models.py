"""The architectures of transformers that train, each as a tiny model: configurations are cut down automatically."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from galvatron.core.spec import Attention, Precision, Training
from galvatron.families.tiny import tiny_config
from galvatron.runtime.trial import random_model

__all__ = ["LENGTH", "Architecture", "architectures", "small_config", "training_of"]

LENGTH = 16
"""Tokens of a sample."""
_DEGREE = 2
_LAYERS, _MOST_LAYERS = 4, 12

_HEADS: Mapping[str, Mapping[str, Any]] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_dense_layers")
"""How many blocks before the first one with experts: one of them shows as much as three."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class of transformers."""

    name: str
    head: str
    """Which of the auto mappings it is in first."""

    @property
    def stock(self) -> Any:
        """The class itself."""
        return getattr(transformers, self.name)

    def model(self) -> tuple[nn.Module, Training]:
        """A tiny one with random weights, and how it is trained."""
        training = training_of(self.stock)
        return random_model(self.stock, small_config(self.stock.config_class()), training), training


def architectures() -> dict[str, Architecture]:
    """Every class with a head for causal or masked language modelling, sequence-to-sequence or images, by its name."""
    found: dict[str, Architecture] = {}
    for head, mapping in _HEADS.items():
        for names in mapping.values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, Architecture(name, head))
    return found


def training_of(stock: Any) -> Training:
    """In fp32, with fused attention where the model has it."""
    attention = Attention.FUSED if stock._supports_sdpa else Attention.EAGER
    return Training(precision=Precision.FP32, dropout=False, attention=attention, sequence_length=LENGTH)


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Narrow and of few layers, but of every kind that the configuration has by default."""
    config = copy.deepcopy(config)
    _cut(config)
    return tiny_config(config, degree=_DEGREE)


def _cut(config: Any) -> None:
    """Keep the first blocks, so many that each kind is among them; lists of one entry a block are cut likewise."""
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for value in fields.values():
        if isinstance(value, PreTrainedConfig):
            _cut(value)
    for name in _FIRST_DENSE:
        if isinstance(fields.get(name), int) and fields[name] > 1:
            setattr(config, name, 1)
    counts = {name: value for name, value in fields.items() if _counts_layers(name, value)}
    for name, count in counts.items():
        lists = {key: own for key, own in fields.items() if isinstance(own, list | tuple) and len(own) == count}
        kept = min(count, _blocks_to_keep(fields, lists))
        setattr(config, name, kept)
        for key, own in lists.items():
            if name.startswith("num_hidden") or key.startswith(("layer", "mlp", "attention", "block")):
                setattr(config, key, type(own)(own[:kept]))


def _counts_layers(name: str, value: Any) -> bool:
    ends = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
    return isinstance(value, int) and not isinstance(value, bool) and value > _LAYERS and name.endswith(ends)


def _blocks_to_keep(fields: Mapping[str, Any], lists: Mapping[str, Any]) -> int:
    kept = _LAYERS
    for name, value in fields.items():
        if isinstance(value, int) and name.endswith(("_period", "_pattern", "_interval", "_every_n_layers")):
            kept = max(kept, value)
    for own in lists.values():
        kinds = set(map(str, own))
        if 1 < len(kinds) <= _LAYERS:
            kept = max(kept, *(next(at for at, each in enumerate(own) if str(each) == kind) + 1 for kind in kinds))
    return min(kept, _MOST_LAYERS)
