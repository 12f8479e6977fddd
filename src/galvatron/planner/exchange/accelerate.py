"""Accelerate: the file that ``accelerate launch --config_file`` reads (1.15). It has no pipelines for training."""

from __future__ import annotations

from typing import Any

from galvatron.core.spec import OPTIMIZERS, ModelSpec, Precision
from galvatron.planner.exchange.target import Target, notes_to_programs
from galvatron.planner.exchange.uniform import Recompute, Sharding, Uniform
from galvatron.planner.exchange.yaml_text import yaml_text

__all__ = ["ACCELERATE", "config_of"]


def config_of(layout: Uniform, model: ModelSpec) -> dict[str, Any]:
    """The content of the file."""
    sharded = layout.data > 1 and layout.sharding is not Sharding.NONE
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_GPU" if layout.devices > 1 else "NO",
        "mixed_precision": "bf16" if model.training.precision is Precision.BF16 else "no",
        "num_processes": layout.devices,
    }
    if sharded:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": layout.sharding is Sharding.PARAMETERS,
            "fsdp_activation_checkpointing": layout.recompute is Recompute.FULL,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if layout.tensor > 1 or layout.replicas > 1 < layout.shards:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": layout.replicas,
            "parallelism_config_dp_shard_size": layout.shards,
            "parallelism_config_tp_size": layout.tensor,
            "parallelism_config_cp_size": 1,
        }
    return config


def _write(layout: Uniform, model: ModelSpec) -> str:
    return yaml_text(config_of(layout, model))


def _more(layout: Uniform, model: ModelSpec) -> str | None:
    if layout.tensor > 1 and layout.replicas > 1 and layout.shards == 1:
        return "does not put TP under replicas without shards"
    if model.has_experts and layout.tensor > 1:
        return "is not known to split experts under TP"
    return None


def _notes(layout: Uniform, model: ModelSpec) -> tuple[str, ...]:
    sharded = layout.data > 1 and layout.sharding is not Sharding.NONE
    notes = ["say num_machines, machine_rank and main_process_ip too where there are several machines"]
    notes = notes if layout.devices > 1 else []
    notes.append(f"give the data loader {layout.micro_batch} samples a device, which the file does not say")
    if layout.micro_batches > 1:
        notes.append(f"pass --gradient_accumulation_steps {layout.micro_batches} to accelerate launch")
    if sharded and layout.micro_batches > 1:
        notes.append(
            "the plan reduces gradients after each micro-batch: give the Accelerator a GradientAccumulationPlugin with "
            "sync_each_batch=True, or whole gradients take memory that was not planned"
        )
    if layout.tensor > 1:
        notes.append("load the model with tp_plan='auto' and the accelerator's device mesh")
    notes += notes_to_programs(model, recomputes=layout.recompute is Recompute.FULL and not sharded)
    return tuple(notes)


ACCELERATE = Target(
    name="accelerate",
    title="Accelerate",
    suffix=".yaml",
    comment="# ",
    pipelines=False,
    shardings=frozenset({Sharding.NONE, Sharding.GRADIENTS, Sharding.PARAMETERS}),
    hybrid=True,
    sequence_parallel=False,
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    partial=False,
    fused_loss=False,
    experts=False,
    optimizers=frozenset(optimizer.name for optimizer in OPTIMIZERS),
    more=_more,
    write=_write,
    notes=_notes,
)
