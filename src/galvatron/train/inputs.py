"""What a run reads, opened as its settings say, and checked before anything is measured or started. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from galvatron.core.spec import Training
from galvatron.families.build import build_meta
from galvatron.families.generic.image_examples import example_of
from galvatron.families.registry import layered_model
from galvatron.families.saved import SavedWeights
from galvatron.train.checkpoints.folder import complete
from galvatron.train.checkpoints.manifest import Manifest
from galvatron.train.data.loader import Position
from galvatron.train.data.opening import Data, open_data
from galvatron.train.run_folder import RunFolder
from galvatron.train.settings import Settings

__all__ = ["check_position", "check_weights", "open_run_data"]


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
