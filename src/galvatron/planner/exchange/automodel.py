"""NeMo Automodel: the sections of a recipe's YAML that say how to parallelise (0.7)."""

from __future__ import annotations

from typing import Any

from galvatron.core.spec import ADAMW, GPIPE, ModelSpec, Precision
from galvatron.planner.exchange.target import Target
from galvatron.planner.exchange.torchtitan import sharded_pipeline, stage_modules
from galvatron.planner.exchange.uniform import Recompute, Sharding, Uniform
from galvatron.planner.exchange.yaml_text import yaml_text

__all__ = ["AUTOMODEL", "config_of"]


def config_of(layout: Uniform, model: ModelSpec) -> dict[str, Any]:
    """The sections of the recipe."""
    pipelined = layout.pipeline > 1
    local = layout.micro_batch * (layout.micro_batches if pipelined else 1)
    replicated = layout.sharding is Sharding.NONE and layout.data > 1
    distributed: dict[str, Any] = {"strategy": "ddp" if replicated else "fsdp2"}
    if not replicated:
        distributed |= {
            "dp_size": layout.data,
            "dp_replicate_size": layout.replicas,
            "tp_size": layout.tensor,
            "pp_size": layout.pipeline,
            "cp_size": 1,
            "ep_size": layout.expert,
            "sequence_parallel": layout.sequence_parallel,
            "reshard_after_forward": layout.sharding is Sharding.PARAMETERS,
            "defer_fsdp_grad_sync": pipelined,
            "enable_compile": model.training.compile,
        }
    distributed["activation_checkpointing"] = "full" if layout.recompute is Recompute.FULL else False
    if pipelined:
        distributed["pipeline"] = {
            "pp_schedule": "gpipe" if layout.schedule == GPIPE.name else "1f1b",
            "pp_microbatch_size": layout.micro_batch,
            "module_fqns_per_model_part": stage_modules(
                layout.blocks, ["model.embed_tokens"], ["model.norm", "lm_head"], "model."
            ),
        }
    return {
        "step_scheduler": {"global_batch_size": layout.batch, "local_batch_size": local},
        "distributed": distributed,
    }


def _write(layout: Uniform, model: ModelSpec) -> str:
    return yaml_text(config_of(layout, model))


def _more(layout: Uniform, model: ModelSpec) -> str | None:
    if layout.sharding is Sharding.NONE and layout.data > 1 and layout.tensor * layout.pipeline > 1:
        return "replicates parameters only without TP and without a pipeline"
    if layout.pipeline > 1 and any(layer.tied_parameters for layer in model.layers):
        return "does not divide a model with tied embeddings into stages"
    if model.has_experts and layout.tensor > 1:
        return "is not known to run experts under TP"
    if layout.expert > 1 and layout.sharding is not Sharding.PARAMETERS and layout.expert != layout.data:
        return "shards what expert parallelism leaves whole"
    if layout.expert > 1 and layout.replicas > 1:
        return "is not known to replicate experts over sharded ones"
    return sharded_pipeline(layout)


def _notes(layout: Uniform, model: ModelSpec) -> tuple[str, ...]:
    notes = ["put these sections into the model's recipe"]
    if model.training.precision is not Precision.BF16:
        notes.append("FSDP2 computes in bf16 there unless distributed.mp_policy says otherwise; the plan does not")
    else:
        notes.append("set model.torch_dtype: float32, for masters in fp32 as the plan has them")
    if layout.recompute is Recompute.FULL:
        notes.append("full checkpointing keeps the inputs of attention and feed-forward apart, so a little more memory")
    if model.training.tunes:
        notes.append("the plan freezes parameters: freeze the same ones")
    return tuple(notes)


AUTOMODEL = Target(
    name="automodel",
    title="NeMo Automodel",
    suffix=".yaml",
    comment="# ",
    pipelines=True,
    shardings=frozenset(Sharding),
    hybrid=True,
    sequence_parallel=True,
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    partial=False,
    fused_loss=False,
    experts=True,
    optimizers=frozenset({ADAMW.name}),
    more=_more,
    write=_write,
    notes=_notes,
)
