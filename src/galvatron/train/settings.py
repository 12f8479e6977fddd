"""What may be said about a training run, checked before any process starts. No torch: the launcher reads it too."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import parse, read_text
from galvatron.core.spec import optimizer_named

__all__ = ["Decay", "Settings", "learning_rate"]


_HELD_OUT_BATCHES = 4


class Decay(StrEnum):
    """How the learning rate falls after warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A training run besides its plan."""

    steps: int = 100
    """Optimizer steps in all, those before a resume included."""
    epochs: float | None = None
    """How often the data are seen, in place of steps, which follow from it when the batch is known."""
    learning_rate: float = 3e-4
    warmup: int | None = None
    """Steps of linear warm-up; None: a tenth of all."""
    decay: Decay = Decay.COSINE
    final_rate: float = 0.1
    """Learning rate at the end, as a share of the highest."""
    weight_decay: float = 0.01
    """Of matrices; vectors (biases, norms) are left alone."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    momentum: float = 0.9
    """Of SGD."""
    label_smoothing: float = 0.0
    """Share of each target that all words have in equal parts, in training and in evaluation."""
    clip: float | None = 1.0
    """Largest norm of the gradient; None: it is not clipped."""
    seed: int = 0
    """Of initial weights, dropout and the order of samples."""
    data: str | None = None
    """A file or folder; None: synthetic."""
    evaluation_data: str | None = None
    """A file or folder to evaluate on; None: a part of the data is held out."""
    tokenizer: str | None = None
    text_field: str | None = None
    """Of tables and lines of JSON: the field with the text; None: "text"."""
    pack: bool | None = None
    """Whether several documents stand in a row, kept apart, or one; None: conversations are packed, text is not cut by
    documents."""
    workers: int | None = None
    """Threads that prepare batches beside each rank; 0: the rank itself does, between steps; None: one on GPUs."""
    weights: str | None = None
    """A folder of safetensors to start from."""
    adapters: str | None = None
    """A folder of low-rank adapters, as peft writes it, to start from."""
    evaluate_every: int | None = None
    """Steps between evaluations; None: never, or at the end where there are data to evaluate on."""
    held_out: float = 0.05
    """Share of the samples that are held out where there are evaluations."""
    evaluate_batches: int | None = None
    """In an evaluation; None: all of the data to evaluate on, or few where a part of the data is held out."""
    save_every: int | None = None
    """Steps between checkpoints; None: at the end only."""
    keep: int = 3
    """Checkpoints kept."""
    compare_every: int = 100
    """Steps between comparisons of the replicas of parameters; 0: never."""
    timeout_s: float = 300.0
    """A rank that gives no sign for so long hangs."""
    trace_step: int | None = None
    """Step of which a profiler trace is written."""
    tensorboard: bool = False
    wandb: str | None = None
    """Project on Weights & Biases."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise InvalidInput(f"{_option(name)}: {value} given; expected at least {least}")
        for name in ("learning_rate", "timeout_s", "epochs"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"{_option(name)}: {value} given; expected a number above 0")
        for name in ("final_rate", "held_out"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidInput(f"{_option(name)}: {getattr(self, name)} given; expected a share from 0 to 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidInput(f"betas: {self.betas} given; expected two numbers from 0 to below 1")
        for name in ("momentum", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidInput(f"{_option(name)}: {getattr(self, name)} given; expected a number from 0 to below 1")
        if self.warmup is not None and self.warmup > self.steps and self.epochs is None:
            raise InvalidInput(f"warmup: {self.warmup} steps given, but the run has {self.steps}; give fewer")
        if self.evaluate_every is not None and not self.held_out:
            raise InvalidInput("held-out: 0 given, but evaluations are asked for; give a share above 0")

    def with_steps(self, samples: int, batch: int) -> Settings:
        """With the steps that the epochs make, of so many samples."""
        if self.epochs is None:
            return self
        return replace(self, steps=max(1, math.ceil(self.epochs * samples / batch)), epochs=None)

    @property
    def evaluated_batches(self) -> int | None:
        """In an evaluation; None: all."""
        if self.evaluate_batches is None and self.evaluation_data is None:
            return _HELD_OUT_BATCHES
        return self.evaluate_batches

    @property
    def warmup_steps(self) -> int:
        return self.steps // 10 if self.warmup is None else self.warmup

    def data_options(self, cache: Path) -> dict[str, Any]:
        """How the data are opened, besides what they are."""
        return {
            "tokenizer": self.tokenizer,
            "model_folder": None if self.weights is None else Path(self.weights),
            "text_field": self.text_field,
            "pack": self.pack,
            "seed": self.seed,
            "cache": cache,
            "held_out": self.held_out if self.evaluate_every and self.evaluation_data is None else 0.0,
            "evaluation": self.evaluation_data,
        }

    def optimizer_options(self, name: str) -> dict[str, Any]:
        """What the optimizer of this name takes besides learning rate and weight decay."""
        return {setting: getattr(self, setting) for setting in optimizer_named(name).settings}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def load(path: Path) -> Settings:
        """Read back what a run was started with."""
        content = parse(read_text(path, "the settings of a run"), str(path), "JSON")
        known = {field.name for field in fields(Settings)}
        if not isinstance(content, dict) or set(content) - known:
            unknown = ", ".join(sorted(set(content) - known)) if isinstance(content, dict) else repr(content)
            raise InvalidInput(f"{path}: {unknown} is no setting of a run; expected {', '.join(sorted(known))}")
        try:
            content["decay"] = Decay(content.get("decay", Decay.COSINE))
            content["betas"] = tuple(content.get("betas", (0.9, 0.999)))
            return Settings(**content)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{path}: {error}; start the run anew") from error


_LEAST = {
    "steps": 1,
    "warmup": 0,
    "weight_decay": 0,
    "clip": 1e-12,
    "seed": 0,
    "workers": 0,
    "evaluate_every": 1,
    "evaluate_batches": 1,
    "save_every": 1,
    "keep": 1,
    "compare_every": 0,
    "trace_step": 1,
}


def _option(name: str) -> str:
    return name.removesuffix("_s").replace("_", "-")


def learning_rate(step: int, settings: Settings) -> float:
    """Of the step with this number, from 1: linear warm-up, then decay to the final share at the last step."""
    highest, warmup = settings.learning_rate, settings.warmup_steps
    if step <= warmup:
        return highest * step / warmup
    done = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
    if settings.decay is Decay.CONSTANT:
        left = 1.0
    elif settings.decay is Decay.LINEAR:
        left = 1 - done
    else:
        left = (1 + math.cos(math.pi * done)) / 2
    return highest * (settings.final_rate + (1 - settings.final_rate) * left)
