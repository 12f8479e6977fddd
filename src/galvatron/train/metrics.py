"""What a run measures, step by step: JSON lines always, TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from galvatron.errors import InvalidInput
from galvatron.train.settings import Settings

__all__ = ["MetricsFile", "Sink", "check_sinks", "open_sinks", "read_metrics"]


class Sink(Protocol):
    """Takes one step's figures."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """A JSON object a line, each with its step."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Lines of later steps, written by a run that died before it saved them, are dropped: they come again."""
        kept = [line for line in read_metrics(path) if line["step"] <= after_step]
        aside = path.with_suffix(".partial")
        aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(aside, path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **figures}) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines; the last one may have been cut off by a crash."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project=project, dir=str(folder), config=config, resume="allow", id=folder.name)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def check_sinks(settings: Settings) -> None:
    """Whether the packages that the settings ask for are installed."""
    from importlib.util import find_spec

    for asked, package in ((settings.tensorboard, "tensorboard"), (settings.wandb is not None, "wandb")):
        if asked and find_spec(package) is None:
            raise InvalidInput(f"{package}: asked for but not installed; pip install 'galvatron[{package}]'")


def open_sinks(folder: Path, metrics_file: Path, settings: Settings, *, after_step: int) -> list[Sink]:
    """Where rank 0 writes."""
    sinks: list[Sink] = [MetricsFile(metrics_file, after_step=after_step)]
    if settings.tensorboard:
        sinks.append(_TensorBoard(folder / "tensorboard"))
    if settings.wandb is not None:
        sinks.append(_WeightsAndBiases(settings.wandb, folder, settings.to_dict()))
    return sinks
