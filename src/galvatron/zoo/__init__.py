"""Models as facts: by name, from a Hugging Face configuration, or from figures of your own."""

from __future__ import annotations

import difflib
from pathlib import Path

from galvatron.errors import InvalidInput
from galvatron.spec.model import ModelSpec, Training
from galvatron.zoo.presets import find_preset, preset_names

__all__ = ["load_model", "model_names"]


def model_names() -> tuple[str, ...]:
    """The models known by name."""
    return preset_names()


def load_model(source: str | Path, training: Training) -> ModelSpec:
    """The model ``source`` names."""
    name = str(source)
    preset = find_preset(name)
    if preset is None:
        close = difflib.get_close_matches(name, preset_names(), n=3)
        raise InvalidInput(f"unknown model {name!r}; close: {close}")
    return preset.spec(name, training)
