"""What is measured while training runs, for programs: throughput, and the files that figures go to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Precision
from galvatron.planner.plan.plan import Plan
from galvatron.train.settings import Settings

__all__ = ["MetricsFile", "Sink", "Throughput", "check_sinks", "open_sinks", "peak_flops_per_s", "read_metrics"]

_PEAKS = {
    "H200": (67e12, 494e12, 989e12),
    "H100": (67e12, 494e12, 989e12),
    "A100": (19.5e12, 156e12, 312e12),
    "L4": (30.3e12, 60e12, 121e12),
    "RTX 4090": (82.6e12, 82.6e12, 165e12),
    "RTX 3090": (35.6e12, 35.6e12, 71e12),
    "TITAN RTX": (16.3e12, 16.3e12, 16.3e12),
}
"""Dense peaks in fp32, with TF32 products and in bf16 from the makers' data sheets, by a part of the device's name."""


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """A device's peak, where its name is known."""
    for name, peaks in _PEAKS.items():
        if name in device_name:
            return peaks[(Precision.FP32, Precision.TF32, Precision.BF16).index(precision)]
    return None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Figures of one iteration."""

    samples_per_s: float
    tokens_per_s: float | None
    """None for models without tokens."""
    peak_share: float | None
    """None where the device's peak is not known."""

    @classmethod
    def of(cls, plan: Plan, iteration_s: float, device_name: str) -> Throughput:
        samples_per_s = plan.batch / iteration_s
        length = plan.model.training.sequence_length or (plan.model.config or {}).get("max_position_embeddings")
        spec = plan.model.spec()
        peak = peak_flops_per_s(device_name, plan.model.training.precision)
        return cls(
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * length if length else None,
            peak_share=3 * spec.forward_flops * samples_per_s / (plan.cluster.devices * peak) if peak else None,
        )


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
