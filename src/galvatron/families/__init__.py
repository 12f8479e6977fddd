"""Models, clusters and profiles as facts: by name, from files, models also from a Hugging Face configuration.

Needs neither torch nor transformers: a model is arithmetic here. Knows ``spec``; nothing here knows costs.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.files.clusters import cluster_names, load_cluster
from galvatron.core.files.profiles import load_profile
from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families.paper import paper_profile
from galvatron.families.presets import configured_names, find_preset, preset_names

__all__ = [
    "cluster_names",
    "configured_names",
    "load_cluster",
    "load_model",
    "load_profile",
    "model_names",
    "paper_profile",
]


def model_names() -> tuple[str, ...]:
    """The models known by name whose layers are counted. Those ending in a depth ("bert-huge-32") exist for other
    depths too."""
    return preset_names()


def load_model(source: str | Path | dict[str, Any], training: Training) -> ModelSpec:
    """The model that ``source`` names, trained that way.

    A preset's name, a ``.toml`` file (layers with their figures), a ``.json`` file or folder with a Hugging Face
    configuration, the content of such a file, or a ``.json`` file with a traced model. A name that is also a folder
    means the preset; write ``./name`` for the folder. What is frozen is counted elsewhere, for that needs torch.
    """
    if training.tunes:
        raise InvalidInput("freeze: parameters are counted by the stock model; load it with load_any_model")
    if isinstance(source, dict):
        from galvatron.families.huggingface import model_of_config

        return model_of_config(source, Path("config"), str(source.get("model_type", "model")), training)
    preset = find_preset(source) if isinstance(source, str) else None
    if preset is not None:
        return preset.spec(str(source), training)
    path = Path(source)
    # The readers are imported here because a preset, the common case, needs neither them nor pydantic.
    if path.suffix == ".toml":
        from galvatron.families.custom import read_custom

        return read_custom(path, training)
    folder = os.path.isdir(path)  # unlike Path.is_dir, says no to a name too long for a file
    if path.suffix == ".json" or folder:
        from galvatron.families.huggingface import read_huggingface
        from galvatron.families.traced import read_traced

        traced = None if folder else read_traced(path, training)
        if traced is not None:
            return traced
        named_by = path if folder else path.parent
        name = named_by.resolve().name if folder or path.name == "config.json" else path.stem
        spelled = os.fsencode(name).decode("utf-8", "replace")  # plans are UTF-8, names of folders may be any bytes
        return read_huggingface(path, spelled or "model", training)
    known = (*preset_names(), *configured_names())
    close = difflib.get_close_matches(str(source), known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}."
    raise InvalidInput(
        f"unknown model {str(source)!r}; {hint} A .toml file, or a .json file or folder with a Hugging Face "
        "configuration will also do"
    )
