"""The architectures of transformers that train, each as a tiny model: configurations are cut down automatically."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.core.spec import Attention, Precision, Training
from galvatron.families.shallow import shallow_config
from galvatron.families.tiny import tiny_config
from galvatron.runtime.trial import NotChecked, random_model

__all__ = ["LENGTH", "Architecture", "architectures", "small_config", "training_of"]

LENGTH = 16
"""Tokens of a sample."""
_DEGREE = 2
_PIXELS = 64
_WITH_IMAGES = " with images"

_HEADS: Mapping[str, Mapping[str, Any]] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "image": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "image and text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
_OPEN: Mapping[str, Any] = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "head_dim": 128,
    "num_key_value_heads": None,
}
"""What configuration classes leave open (None) though their models need a number; most publish it with each model."""


def _rotary(sections: list[int]) -> dict[str, Any]:
    """Rotary positions of time, height and width, as models of images and text publish them."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0, "mrope_section": sections}
    return {"rope_parameters": rope}


_OPEN_IN: Mapping[str, Mapping[str, Any]] = {
    **{name: _rotary([16, 24, 24]) for name in ("qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text")},
    **{name: _rotary([8, 12, 12]) for name in ("glm4v_text", "glm4v_moe_text", "glm_ocr_text")},
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
    images: bool = False
    """Whether its batches have images beside text."""

    @property
    def stock(self) -> Any:
        """The class itself."""
        return getattr(transformers, self.name.removesuffix(_WITH_IMAGES))

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
    for names in _HEADS["image and text"].values():
        for name in (names,) if isinstance(names, str) else names:
            images = f"{name}{_WITH_IMAGES}"
            found.setdefault(images, Architecture(images, "image and text, with images", images=True))
    return found


def training_of(stock: Any) -> Training:
    """In fp32, with fused attention where the model has it."""
    attention = Attention.FUSED if stock._supports_sdpa else Attention.EAGER
    length = LENGTH if stock.main_input_name == "input_ids" else None
    return Training(precision=Precision.FP32, dropout=False, attention=attention, sequence_length=length)


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Narrow and of few layers, but of every kind that the configuration has by default."""
    config = shallow_config(config)
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
