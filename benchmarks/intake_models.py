"""The architectures of transformers that train, each as a tiny model: configurations are cut down automatically."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.core.spec import Attention, Precision, Training
from galvatron.families.tiny import tiny_config
from galvatron.runtime.trial import NotChecked, random_model

__all__ = ["LENGTH", "Architecture", "architectures", "small_config", "training_of"]

LENGTH = 16
"""Tokens of a sample."""
_DEGREE = 2
_LAYERS, _MOST_LAYERS = 4, 12
_PIXELS = 64

_HEADS: Mapping[str, Mapping[str, Any]] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "image and text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_dense_layers")
"""How many blocks before the first one with experts: one of them shows as much as three."""
_OPEN: Mapping[str, Any] = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "head_dim": 128,
    "num_key_value_heads": None,
}
"""What configuration classes leave open (None) though their models need a number; most publish it with each model."""
_OPEN_IN: Mapping[str, Mapping[str, Any]] = {
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "reformer": {"axial_pos_shape": (8, 8), "axial_pos_embds_dim": (8, 24)},
    "xmod": {"default_language": "en_XX"},
}
"""The same by model type."""


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
        config, training = self.default(), training_of(self.stock)
        try:
            return random_model(self.stock, small_config(config), training), training
        except (GalvatronError, NotChecked) as error:
            reason = self._unbuildable()
            if reason is None:
                raise InvalidInput(str(error)) from error
            raise InvalidInput(f"its default configuration builds no model either ({reason})") from error

    def default(self) -> PreTrainedConfig:
        """The configuration that its class makes without arguments."""
        try:
            config: PreTrainedConfig = self.stock.config_class()
        except Exception as error:
            raise InvalidInput(f"its configuration class has no valid defaults ({_line(error)})") from error
        if self.head == "causal" and hasattr(config, "is_decoder"):
            config.is_decoder = True
        return config

    def _unbuildable(self) -> str | None:
        """Why transformers itself cannot build the model of the default configuration; None: it can."""
        try:
            with torch.device("meta"):
                self.stock._from_config(self.default())
        except Exception as error:
            return _line(error)
        return None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


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
    length = LENGTH if stock.main_input_name == "input_ids" else None
    return Training(precision=Precision.FP32, dropout=False, attention=attention, sequence_length=length)


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Narrow and of few layers, but of every kind that the configuration has by default."""
    config = copy.deepcopy(config)
    _cut(config)
    _complete(config)
    return tiny_config(config, degree=_DEGREE)


def _complete(config: Any) -> None:
    """Give values to what configuration classes leave open, though no model of theirs runs without; small images."""
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            _complete(value)
    heads = vars(config).get("num_attention_heads")
    open_ = {**_OPEN, "num_key_value_heads": heads, **_OPEN_IN.get(config.model_type, {})}
    for name, value in open_.items():
        if name in vars(config) and value is not None and (vars(config)[name] is None or name not in _OPEN):
            setattr(config, name, value)
    for name in ("decoder_start_token_id", "pad_token_id") if config.is_encoder_decoder else ():
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    if "image_size" in vars(config):
        patch = getattr(config, "patch_size", None)
        sides = _PIXELS * (2 if hasattr(config, "depths") else 1)  # whose last stage sees a part of them
        config.image_size = _image(config.image_size, patch if isinstance(patch, int) else 1, sides)


def _image(size: Any, patch: int, pixels: int) -> Any:
    """At most so many pixels a side, or four patches, and whole patches."""
    if isinstance(size, list | tuple):
        return type(size)(_image(own, patch, pixels) for own in size)
    return min(size, max(pixels // patch, 4) * patch) if isinstance(size, int) else size


def _cut(config: Any) -> None:
    """Keep the first blocks, so many that each kind is among them; lists of one entry a block are cut likewise."""
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for value in fields.values():
        if isinstance(value, PreTrainedConfig):
            _cut(value)
    if isinstance(fields.get("depths"), list | tuple):
        config.depths = type(fields["depths"])(min(own, 2) for own in fields["depths"])
    for name in _FIRST_DENSE:
        if isinstance(fields.get(name), int) and fields[name] > 1:
            setattr(config, name, 1)
    if isinstance(fields.get("num_kv_shared_layers"), int):
        config.num_kv_shared_layers = min(fields["num_kv_shared_layers"], _LAYERS // 2)
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
            kept = max(kept, *(_place(own, kind) + 1 for kind in kinds))
    return min(kept, _MOST_LAYERS)


def _place(kinds: Sequence[Any], kind: str) -> int:
    """Where a kind is; of blocks that share weights with each other, where the second is."""
    places = [at for at, each in enumerate(kinds) if str(each) == kind]
    return places[min(1, len(places) - 1)] if kind == "hybrid" else places[0]
