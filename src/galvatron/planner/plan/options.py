"""What may be said about a plan, listed once: keywords in Python, options on the command line. Light."""

from __future__ import annotations

import difflib
import operator
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast, get_args, get_type_hints

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.optimizer import ADAMW, OPTIMIZERS
from galvatron.core.spec.schedule import ONE_F_ONE_B, SCHEDULES
from galvatron.core.spec.switches import SWITCHES, SwitchChoices

__all__ = ["Setup", "checked_setup", "help_of", "setup_fields"]

_SCHEDULES = " or ".join(schedule.name for schedule in SCHEDULES)
_OPTIMIZERS = ", ".join(optimizer.name for optimizer in OPTIMIZERS)


class _Sizes(TypedDict, total=False):
    """The text beside each type is its help on the command line."""

    devices: Annotated[int | None, "How many of the cluster's devices (default: all; of a preset GPU one node)."]
    node_link: Annotated[str | None, "Network of a node: 200Gb, or 8x400Gb for a port each (default: the preset's)."]
    memory: Annotated[str | int | None, "Memory budget of each device: 8GB, 8GiB (default: all it has)."]
    batch: Annotated[
        str | int | None, "Global batch in samples; best: any up to 64 a device (default: up to 4M tokens)."
    ]
    batch_tokens: Annotated[str | int | None, "Global batch in tokens: 4M (4e6), 4Mi (4·2^20)."]
    batch_step: Annotated[int | None, "Search batches in steps of this many samples (default 8)."]
    max_batch: Annotated[int | None, "Largest batch searched, in samples."]
    max_micro_batches: Annotated[int | None, "Largest number of micro-batches to consider (default: any)."]
    max_micro_batch: Annotated[int | None, "Largest number of samples in a micro-batch."]
    pipeline: Annotated[int | None, "Exactly this many pipeline stages; 1: no pipeline."]
    pin: Annotated[str | None, "Kinds of layer that keep a strategy, by commas: encoder=tp8,head=dp8."]
    forbid: Annotated[str | None, "Parallelism not to use, by commas: tp; or not across islands: tp:node."]
    space: Annotated[str, "Strategies to search: full, dp, tp, pp, sdp, 3d, dp+tp or dp+pp."]
    schedule: Annotated[str | None, f"Pipeline schedule: {_SCHEDULES} (default {ONE_F_ONE_B.name})."]
    cuts: Annotated[
        str | None, "Where stages begin: exact (default), or balanced by layers, parameters, memory or time."
    ]
    time_limit: Annotated[
        float | None, "Stop the search after so many seconds, with the best plan so far and how far off it may be."
    ]
    precision: Annotated[str | None, "fp32, tf32 (products only) or bf16 (default: bf16 where the device has it)."]
    attention: Annotated[str | None, "Attention kernel: fused (default), eager, or paper (as in 2022)."]
    dropout: Annotated[bool | None, "Train with dropout (default: as the model's configuration says)."]
    sequence_length: Annotated[int | None, "Tokens a sample (default: the model's own)."]
    image_size: Annotated[
        int | None, "One image of so many pixels a side in each sample, beside text (default: text alone)."
    ]
    optimizer: Annotated[str | None, f"Optimizer: {_OPTIMIZERS} (default {ADAMW.name})."]
    expert_imbalance: Annotated[float | None, "Load of the busiest expert rank over the mean (default 1)."]
    compile: Annotated[bool | None, "Compile each block with torch.compile (default: on GPUs)."]
    profile: Annotated[str | Path | None, "Measured layer times, from 'galvatron profile model' (.toml)."]
    freeze: Annotated[str | None, "Parameters to freeze: names of parameters or modules, with *, separated by commas."]
    lora: Annotated[int | None, "Train LoRA adapters of this rank; the rest is frozen (but see --lora-full)."]
    lora_alpha: Annotated[float | None, "LoRA alpha (default: twice the rank)."]
    lora_targets: Annotated[str | None, "Projections that get an adapter, separated by commas (default: all-linear)."]
    lora_full: Annotated[
        str | None, "Modules that train in full beside adapters, by commas (default: the head of a classifier)."
    ]
    train_only: Annotated[str | None, "Parameters to train, everything else is frozen; written as for --freeze."]


class Setup(_Sizes, SwitchChoices, total=False):
    """What a user says about a plan; None or nothing: not said. The paper's setting fixes GPipe, fp32, its models'
    attention, its space and pruning, the systems of its time; unless said otherwise also its guideline for cuts (by
    memory) and few micro-batches."""

    paper: Annotated[bool, "Plan as the paper did: GPipe, fp32 (TF32 where GPUs have it), no recompute, its space."]


def setup_fields() -> dict[str, Any]:
    """The type of each field of a setup, in order."""
    return get_type_hints(Setup)


def help_of(name: str) -> str:
    """What the command line says of a field of a setup."""
    switches = {switch.name: switch.help for switch in SWITCHES}
    return switches[name] if name in switches else get_type_hints(Setup, include_extras=True)[name].__metadata__[0]


def checked_setup(setup: Setup) -> Setup:
    """The setup with values of the types that fields have, whole numbers of other libraries made into Python's; raises
    :class:`InvalidInput` for an unknown field or a value that it cannot have."""
    fields = setup_fields()
    for name in setup:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"they are {', '.join(fields)}"
            raise InvalidInput(f"{name!r} is not an option of a plan; {hint}")
    return cast("Setup", {name: _value(name, fields[name], value) for name, value in setup.items()})


def _value(name: str, kind: Any, value: Any) -> Any:
    kinds = get_args(kind) or (kind,)
    if value is None and type(None) in kinds:
        return None
    boolean = isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")
    if bool in kinds:
        if not boolean:
            raise InvalidInput(f"{_said(name)}: {value!r} given; expected True or False")
        return bool(value)
    if any(isinstance(value, each) for each in kinds if each not in (int, float, type(None))):
        return value
    if int in kinds and not boolean:
        try:
            return operator.index(value)
        except TypeError:
            pass
    if float in kinds and not boolean and hasattr(value, "__float__"):
        return float(value)
    wanted = {int: "a whole number", float: "a number", str: "text", Path: "a path"}
    raise InvalidInput(
        f"{_said(name)}: {value!r} given; expected {' or '.join(wanted[each] for each in kinds if each in wanted)}"
    )


def _said(name: str) -> str:
    return name.replace("_", "-")
