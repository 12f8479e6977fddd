"""Model files: the facts of a model that was traced, in JSON, so that planning for it needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import invalid, naming, read_text
from galvatron.core.spec.figures import MOST_LAYERS
from galvatron.core.spec.model import LayerSpec, ModelSpec, Training

__all__ = ["MARK", "dump_model", "model_of_content", "read_model"]

MARK = "galvatron_model"
"""The field that says that a JSON file is one of these, with the version of its format."""
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class _ModelFile:
    galvatron_model: int
    name: str
    family: str
    training: Training
    kinds: tuple[LayerSpec, ...]
    order: tuple[tuple[str, int], ...]
    """Names of kinds, and how many layers in a row."""
    config: dict[str, Any] | None


def dump_model(model: ModelSpec) -> str:
    """The text of a model's file."""
    runs = [(name, len(list(run))) for name, run in groupby(layer.name for layer in model.layers)]
    content = {
        MARK: _VERSION,
        "name": model.name,
        "family": model.family,
        "training": model.training.to_dict(),
        "kinds": [kind.to_dict() for kind in model.kinds],
        "order": runs,
        "config": None if model.config is None else dict(model.config),
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def read_model(path: Path) -> ModelSpec:
    """The model in a file."""
    return model_of_content(read_text(path, "a model in JSON"), str(path))


def model_of_content(text: str, where: str) -> ModelSpec:
    """The model in the text of a file; ``where``: the file's name, for errors."""
    from pydantic import TypeAdapter, ValidationError  # presets need it not, and it takes 70 ms

    try:
        with naming(where):
            file = TypeAdapter(_ModelFile).validate_json(text, strict=True)
    except ValidationError as error:
        raise InvalidInput(f"{invalid(error, where)}; trace the model again") from None
    kinds = {kind.name: kind for kind in file.kinds}
    unknown = [name for name, _ in file.order if name not in kinds]
    if file.galvatron_model != _VERSION or unknown:
        wrong = (
            f"order names {unknown[0]!r}, which is not among kinds" if unknown else f"version {file.galvatron_model}"
        )
        raise InvalidInput(f"{where}: {wrong}; expected a model file of version {_VERSION}; trace the model again")
    if sum(max(count, 0) for _, count in file.order) > MOST_LAYERS:
        raise InvalidInput(f"{where}: order has more than {MOST_LAYERS} layers; trace the model again")
    layers = tuple(kinds[name] for name, count in file.order for _ in range(count))
    return ModelSpec(name=file.name, family=file.family, layers=layers, training=file.training, config=file.config)
