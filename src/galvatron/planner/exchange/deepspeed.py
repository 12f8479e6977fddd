"""DeepSpeed: its JSON configuration (0.19). Pipelines are written in Python there, so there are none here."""

from __future__ import annotations

import json
from typing import Any

from galvatron.core.spec import ADAMW, ModelSpec, Precision
from galvatron.core.spec.optimizer import SGD
from galvatron.planner.exchange.target import Target, notes_to_programs
from galvatron.planner.exchange.uniform import Recompute, Sharding, Uniform

__all__ = ["DEEPSPEED", "STAGES", "config_of"]

STAGES = {Sharding.NONE: 0, Sharding.OPTIMIZER: 1, Sharding.GRADIENTS: 2, Sharding.PARAMETERS: 3}
"""Of ZeRO."""


def config_of(layout: Uniform, model: ModelSpec) -> dict[str, Any]:
    """The content of the file."""
    # Of train_batch_size DeepSpeed counts ranks of TP as if each had samples of its own, so it is left to it under TP.
    config: dict[str, Any] = {
        **({"train_batch_size": layout.batch} if layout.tensor == 1 else {}),
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization": {"stage": STAGES[layout.sharding] if layout.data > 1 else 0, "overlap_comm": True},
        "bf16": {"enabled": model.training.precision is Precision.BF16},
    }
    if model.training.optimizer == SGD.name and config["zero_optimization"]["stage"]:
        config["zero_allow_untested_optimizer"] = True  # without it DeepSpeed divides the states of no SGD
    if layout.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor}
    return config


def _write(layout: Uniform, model: ModelSpec) -> str:
    return json.dumps(config_of(layout, model), indent=1) + "\n"


def _more(layout: Uniform, model: ModelSpec) -> str | None:
    if model.has_experts and layout.tensor > 1:
        return "is not known to split experts by AutoTP"
    return None


def _notes(layout: Uniform, model: ModelSpec) -> tuple[str, ...]:
    notes = [*notes_to_programs(model, recomputes=layout.recompute is Recompute.FULL)]
    if layout.tensor > 1:
        notes.append(f"DeepSpeed reports a train_batch_size {layout.tensor} times the plan's batch of {layout.batch}")
        notes.append("AutoTP splits the linear layers of blocks; the plan was priced with a split vocabulary too")
    return tuple(notes)


DEEPSPEED = Target(
    name="deepspeed",
    title="DeepSpeed",
    suffix=".json",
    comment="",
    pipelines=False,
    shardings=frozenset(Sharding),
    hybrid=False,
    sequence_parallel=False,
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    partial=False,
    fused_loss=False,
    experts=False,
    optimizers=frozenset({ADAMW.name, SGD.name}),
    more=_more,
    write=_write,
    notes=_notes,
)
