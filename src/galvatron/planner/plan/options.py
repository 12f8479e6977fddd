"""What may be said about a plan, listed once: keywords in Python, options on the command line. Light."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

from galvatron.core.spec.optimizer import ADAMW, OPTIMIZERS
from galvatron.core.spec.schedule import ONE_F_ONE_B, SCHEDULES
from galvatron.core.spec.switches import SWITCHES, SwitchChoices

__all__ = ["Setup", "help_of", "setup_fields"]

_SCHEDULES = " or ".join(schedule.name for schedule in SCHEDULES)
_OPTIMIZERS = ", ".join(optimizer.name for optimizer in OPTIMIZERS)


class _Sizes(TypedDict, total=False):
    """The text beside each type is its help on the command line."""

    memory: Annotated[str | int | None, "Budget of each device: 8GB, 8GiB (default: all it has)."]
    batch: Annotated[int | None, "Plan for exactly this global batch."]
    batch_step: Annotated[int | None, "Search batches in steps of this many samples (default 8)."]
    max_batch: Annotated[int | None, "Largest batch searched (default 64 for each device)."]
    max_micro_batches: Annotated[int | None, "Most micro-batches considered."]
    max_micro_batch: Annotated[int | None, "Most samples of a micro-batch."]
    pipeline: Annotated[int | None, "Exactly so many pipeline stages; 1: no pipeline."]
    pin: Annotated[str | None, "Kinds of layer that keep a strategy, by commas: encoder=tp8,head=dp8."]
    forbid: Annotated[str | None, "Parallelism not used, by commas: tp; or not across islands: tp:node."]
    space: Annotated[str, "full, dp, tp, pp, sdp, 3d, dp+tp or dp+pp."]
    schedule: Annotated[str | None, f"{_SCHEDULES} (default {ONE_F_ONE_B.name})."]
    cuts: Annotated[str | None, "exact (default), or a guideline of the paper: layers, parameters, memory, time."]
    precision: Annotated[str | None, "fp32, tf32 (its products only) or bf16 (default: bf16 where the device has it)."]
    attention: Annotated[str | None, "fused (default), eager, or paper."]
    dropout: Annotated[bool | None, "Default: as the model's configuration."]
    sequence_length: Annotated[int | None, "Tokens a sample (default: the model's own)."]
    image_size: Annotated[
        int | None, "One image of so many pixels a side in each sample, beside text (default: text alone)."
    ]
    optimizer: Annotated[str | None, f"{_OPTIMIZERS} (default {ADAMW.name})."]
    expert_imbalance: Annotated[float | None, "Tokens of the busiest expert rank over the mean (default 1)."]
    compile: Annotated[bool | None, "Compile each block with torch.compile (default: on GPUs)."]
    profile: Annotated[str | Path | None, "Measured layers (.toml)."]
    freeze: Annotated[str | None, "Parameters that do not train: names of theirs or of modules, with *, by commas."]
    lora: Annotated[int | None, "Train low-rank adapters of this rank, all else being frozen."]
    lora_alpha: Annotated[float | None, "Their alpha (default: twice the rank)."]
    lora_targets: Annotated[str | None, "Projections that have one, by commas (default: all-linear)."]
    train_only: Annotated[str | None, "Parameters that train, all others being frozen; as for --freeze."]


class Setup(_Sizes, SwitchChoices, total=False):
    """What a user says about a plan; None or nothing: not said. The paper's setting fixes GPipe, fp32, its models'
    attention, its space and pruning, the systems of its time; unless said otherwise also its guideline for cuts (by
    memory) and few micro-batches."""

    paper: Annotated[
        bool, "The paper's setting: GPipe, fp32, no recompute, its attention, space, pruning and cuts by memory."
    ]


def setup_fields() -> dict[str, Any]:
    """The type of each field of a setup, in order."""
    return get_type_hints(Setup)


def help_of(name: str) -> str:
    """What the command line says of a field of a setup."""
    switches = {switch.name: switch.help for switch in SWITCHES}
    return switches[name] if name in switches else get_type_hints(Setup, include_extras=True)[name].__metadata__[0]
