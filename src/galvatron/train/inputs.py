"""What a run reads, opened as its settings say, and checked before anything is measured or started. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import parse, read_text
from galvatron.core.spec import Training
from galvatron.families.build import build_meta, read_config
from galvatron.families.configurations import different_fields
from galvatron.families.generic.image_examples import example_of
from galvatron.families.registry import layered_model
from galvatron.families.saved import SavedWeights
from galvatron.planner.plan.plan import Plan
from galvatron.train.checkpoints.folder import complete
from galvatron.train.checkpoints.manifest import Manifest
from galvatron.train.data.loader import Position
from galvatron.train.data.opening import Data, open_data
from galvatron.train.run_folder import RunFolder
from galvatron.train.settings import Settings

__all__ = ["check_position", "check_same_model", "check_weights", "open_run_data"]

_LOG = logging.getLogger(__name__)
_NAMED = 5
_OF_THE_TASK = frozenset(
    {"id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "is_decoder", "is_encoder_decoder"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
)


def open_run_data(settings: Settings, config: Mapping[str, Any], training: Training, folder: RunFolder) -> Data:
    """The data of a run; text is tokenized on the first call."""
    return open_data(settings.data, config, training, **settings.data_options(folder.cache))


def check_position(data: Data, seed: int, folder: RunFolder) -> None:
    """Raise :class:`galvatron.InvalidInput` if these are not the data that a run's newest checkpoint has read."""
    saved = complete(folder.checkpoints)
    if saved:
        Position.start(data.train, seed).check_same(
            Position.from_json(Manifest.read(saved[-1].path).progress.get("data", {}))
        )


def check_weights(folder: str, config: Mapping[str, Any], training: Training, *, generic: bool) -> None:
    """Raise :class:`galvatron.InvalidInput` if a folder's weights are not those of the model; reads headers alone."""
    stock = build_meta(dict(config), training, as_named=generic)
    SavedWeights(layered_model(stock, example_of(stock, training), generic=generic), Path(folder))
    file = Path(folder) / "config.json"
    if not file.is_file():
        return
    content = parse(read_text(file, "a model's configuration"), str(file), "JSON")
    if not isinstance(content, Mapping) or content.get("model_type") != config.get("model_type"):
        return
    with suppress(InvalidInput):  # weights that fit are enough
        other = different_fields(read_config(config), read_config(content))
        # Sizes are those of the weights; labels are the new task's.
        other = {name: values for name, values in other.items() if name not in _OF_THE_TASK}
        if other:
            _LOG.warning(
                "weights: those of %s were made with another configuration (%s); the model trains as the plan says",
                folder, _named(other, "there", "in the plan"),
            )  # fmt: skip


def check_same_model(plan: Plan, run: Plan) -> None:
    """Raise :class:`galvatron.InvalidInput` if a run cannot go on under a plan, because that trains another model."""
    assert plan.model.config is not None
    assert run.model.config is not None
    ours, theirs = read_config(plan.model.config), read_config(run.model.config)
    if ours.model_type != theirs.model_type:
        raise InvalidInput(
            f"plan: is for a model of type {ours.model_type!r}, but the run trains {theirs.model_type!r}; plan the "
            "run's model"
        )
    other = {name: values for name, values in different_fields(ours, theirs).items() if "drop" not in name}
    if other:
        raise InvalidInput(
            f"plan: its model is not the run's ({_named(other, 'in the run', 'in the plan')}); plan the run's model, "
            "or start a new run with --weights of an export"
        )
    for name in ("freeze", "train_only", "lora"):
        if getattr(plan.model.training, name) != getattr(run.model.training, name):
            raise InvalidInput(
                f"plan: trains other parameters than the run ({name.replace('_', '-')}); plan with the run's, or "
                "start a new run with --weights of an export"
            )


def _named(fields: Mapping[str, tuple[Any, Any]], there: str, here: str) -> str:
    """Each with its value there, and here."""
    shown = [f"{name} is {other!r} {there}, {own!r} {here}" for name, (own, other) in fields.items()]
    return "; ".join(shown[:_NAMED]) + (f"; and {len(shown) - _NAMED} more" if len(shown) > _NAMED else "")
