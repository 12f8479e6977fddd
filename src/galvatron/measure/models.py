"""Facts of any model: those that families count, and those that are traced from the stock model itself.

Tracing takes seconds and imports torch, so its result is kept in a file; planning from that needs no torch.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.files.models import dump_model, read_model
from galvatron.core.spec import Attention, ModelSpec, Training
from galvatron.core.spec.model import DEFAULT_LONGEST
from galvatron.families import load_model
from galvatron.families.huggingface import UnknownArchitecture
from galvatron.measure import cache

__all__ = ["check_name", "load_any_model", "model_of_text"]

_LOG = logging.getLogger(__name__)
_TRACING = 4
"""Of traced models: raised when the same model would be described differently."""


def load_any_model(source: str | Path | dict[str, Any], training: Training) -> ModelSpec:
    """The model that ``source`` names, trained that way: as :func:`galvatron.families.load_model`, of every
    architecture of transformers that can be traced, and with parameters frozen."""
    if source == "":
        raise InvalidInput("model: '' given; expected a preset's name ('galvatron models'), a file or a folder")
    spec = _load(source, training.untuned())
    return _tuned(spec, training) if training.tunes else spec


def check_name(source: Any, training: Training) -> None:
    """Raise for a name that is no model's and no file's, before minutes are spent on measuring for it."""
    if isinstance(source, str) and not os.path.exists(source):
        with suppress(UnknownArchitecture):
            load_model(source, training.untuned())


def model_of_text(text: str, file: str, training: Training) -> ModelSpec:
    """The model in the text of a file that :func:`load_any_model` would read; ``file``: its name, also in errors."""
    from galvatron.families.custom import custom_of_text
    from galvatron.families.huggingface import content_of_text
    from galvatron.families.traced import traced_of_text

    plain = training.untuned()
    if Path(file).suffix == ".toml":
        spec: ModelSpec | None = custom_of_text(text, file, plain)
    else:
        spec = traced_of_text(text, file, plain)
    if spec is None:
        spec = replace(_load(content_of_text(text, file), plain), name=Path(file).stem)
    return _tuned(spec, training) if training.tunes else spec


def _tuned(spec: ModelSpec, training: Training) -> ModelSpec:
    """With frozen parameters, whose names only the stock model itself knows."""
    if spec.config is None:
        raise InvalidInput(
            f"freeze: {spec.name!r} is described by figures alone, which have no names of parameters; give a preset or "
            "a Hugging Face configuration"
        )
    try:
        from galvatron.families.build import build_meta
        from galvatron.families.lora import add_adapters, decided
        from galvatron.families.registry import layered_model
        from galvatron.families.tuning import freeze, tuned
    except ImportError as error:
        raise InvalidInput(
            f"freeze: {spec.name}'s parameters are counted with PyTorch and transformers, but {error.name or error} is "
            "not installed; install galvatron[torch]"
        ) from None
    model = build_meta(spec.config, spec.training, as_named=spec.family == "generic")
    if training.lora is not None:
        lora = decided(training.lora, model)
        add_adapters(model, lora)
        training = replace(training, lora=lora)
    freeze(model, training)
    asked = replace(spec.training, freeze=training.freeze, train_only=training.train_only, lora=training.lora)
    return tuned(spec, layered_model(model, generic=spec.family == "generic"), asked)


def _load(source: str | Path | dict[str, Any], training: Training) -> ModelSpec:
    try:
        return load_model(source, training)
    except UnknownArchitecture as unknown:
        content, name = unknown.content, unknown.name
    facts = {"config": content, "training": training.to_dict(), "name": name, "tracing": _TRACING}
    kept = cache.cached_file("traced", cache.key_of(**facts))
    kept = kept.with_suffix(".json")
    if kept.exists():
        return read_model(kept)
    try:
        spec = _traced(content, name, training)
    except ImportError as error:
        raise InvalidInput(
            f"{name}: its layers are traced with PyTorch and transformers, but {error.name or error} is not installed; "
            "install galvatron[torch], or give a model file that was made where it is (galvatron models --output)"
        ) from None
    cache.keep(kept, dump_model(spec))
    return spec


def _traced(content: dict[str, Any], name: str, training: Training) -> ModelSpec:
    import torch

    from galvatron.families.build import build_meta, read_config, stock_class
    from galvatron.families.generic.adapter import Generic
    from galvatron.families.generic.examples import takes_tokens
    from galvatron.families.generic.image_examples import example_of, takes_images
    from galvatron.measure.describe import describe

    config = read_config(content)
    stock: Any = stock_class(config, as_named=True)
    if training.attention is Attention.FUSED and not stock._supports_sdpa:
        training = replace(training, attention=Attention.EAGER)
    model = build_meta(content, training, as_named=True)
    tokens = training.sequence_length
    if tokens is None and takes_tokens(model):
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        tokens = min(DEFAULT_LONGEST, most or DEFAULT_LONGEST)
    batch = example_of(model, replace(training, sequence_length=tokens))
    if batch is None:
        if takes_images(model):
            _LOG.warning("%s is planned for text alone, without its vision tower; --image-size plans for images", name)
        batch = Generic(model).example(2, tokens, torch.Generator().manual_seed(0))
    spec = describe(model, batch, training, name=name)
    return replace(spec, config=_named(content, model))


def _named(content: dict[str, Any], model: Any) -> dict[str, Any]:
    """The configuration with the class that it builds."""
    named: dict[str, Any] = json.loads(json.dumps({**content, "architectures": [type(model).__name__]}))
    return named
