"""Megatron-LM: command-line flags (megatron-core 0.16)."""

from __future__ import annotations

import shlex

from galvatron.core.spec import ADAMW, ModelSpec, Precision
from galvatron.core.spec.optimizer import ADAMW_BF16, SGD
from galvatron.core.spec.schedule import ONE_F_ONE_B
from galvatron.planner.exchange.target import Target
from galvatron.planner.exchange.uniform import Recompute, Sharding, Uniform

__all__ = ["MEGATRON", "flags_of"]

_FSDP = {Sharding.GRADIENTS: "optim_grads", Sharding.PARAMETERS: "optim_grads_params"}
"""Megatron-FSDP's names of what it divides."""


def flags_of(layout: Uniform, model: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Each flag with its values."""
    flags: list[tuple[str, ...]] = [
        ("--tensor-model-parallel-size", str(layout.tensor)),
        ("--pipeline-model-parallel-size", str(layout.pipeline)),
        ("--num-layers", str(len(model.layers) - 2)),
        ("--micro-batch-size", str(layout.micro_batch)),
        ("--global-batch-size", str(layout.batch)),
    ]
    if model.training.sequence_length is not None:
        flags.append(("--seq-length", str(model.training.sequence_length)))
    if model.training.precision is Precision.BF16:
        flags.append(("--bf16",))
    if layout.sequence_parallel:
        flags.append(("--sequence-parallel",))
    if model.has_experts:
        tensor = layout.tensor if layout.expert == 1 else layout.expert_tensor
        flags.append(("--expert-model-parallel-size", str(layout.expert)))
        flags.append(("--expert-tensor-parallel-size", str(tensor)))
    if len(set(layout.blocks)) > 1:
        flags.append(("--pipeline-model-parallel-layout", _pipeline_layout(layout.blocks)))
    return (*flags, *_data_flags(layout), *_recompute_flags(layout), *_optimizer_flags(model))


def _pipeline_layout(blocks: tuple[int, ...]) -> str:
    """``Ettt|ttttt|tttL``: the embedding, transformer blocks, the loss."""
    stages = ["t" * count for count in blocks]
    return "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])


def _data_flags(layout: Uniform) -> list[tuple[str, ...]]:
    if layout.data == 1 or layout.sharding is Sharding.NONE:
        return [("--overlap-grad-reduce",)] if layout.data > 1 else []
    flags: list[tuple[str, ...]] = [
        ("--use-distributed-optimizer",),
        ("--overlap-grad-reduce",),
        ("--overlap-param-gather",),
    ]
    if layout.sharding in _FSDP:
        flags += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", _FSDP[layout.sharding]),
            ("--no-gradient-accumulation-fusion",),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    return flags


def _recompute_flags(layout: Uniform) -> list[tuple[str, ...]]:
    if layout.recompute is Recompute.NONE:
        return []
    method, count = ("uniform", 1) if layout.recomputed is None else ("block", layout.recomputed)
    return [
        ("--recompute-granularity", "full"),
        ("--recompute-method", method),
        ("--recompute-num-layers", str(count)),
    ]


def _optimizer_flags(model: ModelSpec) -> list[tuple[str, ...]]:
    if model.training.optimizer == ADAMW_BF16.name:
        return [
            ("--optimizer", "adam"),
            ("--use-precision-aware-optimizer",),
            ("--exp-avg-dtype", "bf16"),
            ("--exp-avg-sq-dtype", "bf16"),
        ]
    return [("--optimizer", "sgd" if model.training.optimizer == SGD.name else "adam")]


def _write(layout: Uniform, model: ModelSpec) -> str:
    return "".join(f"{shlex.join(flag)}\n" for flag in flags_of(layout, model))


def _more(layout: Uniform, model: ModelSpec) -> str | None:
    if layout.pipeline > 1 and layout.schedule != ONE_F_ONE_B.name:
        return f"runs 1F1B, not {layout.schedule}"
    if layout.pipeline > 1 and layout.data > 1 and layout.sharding in _FSDP:
        return f"divides {layout.sharding} by Megatron-FSDP, which goes with TP and EP but not with a pipeline"
    if model.has_experts and layout.tensor > 1 and not layout.sequence_parallel:
        return "runs experts under TP only with sequence parallelism"
    if model.training.tunes:
        return "has no flag for frozen parameters or adapters"
    if model.training.optimizer == ADAMW_BF16.name and (layout.data == 1 or layout.sharding is Sharding.NONE):
        return "keeps moments in bf16 only in its distributed optimizer"
    return None


def _notes(layout: Uniform, model: ModelSpec) -> tuple[str, ...]:
    notes = ["the model's own flags (hidden size, heads, vocabulary, …) are yours to add"]
    if model.training.compile:
        notes.append("time and memory were priced with compiled blocks; Megatron's own fused kernels come near them")
    if model.training.precision is Precision.TF32:
        notes.append("TF32 is PyTorch's setting, not a flag: Megatron multiplies fp32 as PyTorch is told to")
    if layout.sharding in _FSDP and layout.data > 1:
        notes.append("Megatron-FSDP wants CUDA_DEVICE_MAX_CONNECTIONS unset")
    elif layout.tensor > 1:
        notes.append("export CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron wants for TP before Blackwell")
    return tuple(notes)


MEGATRON = Target(
    name="megatron",
    title="Megatron-LM",
    suffix=".args",
    comment="",
    pipelines=True,
    shardings=frozenset(Sharding),
    hybrid=False,
    sequence_parallel=True,
    recompute=frozenset({Recompute.NONE, Recompute.FULL}),
    partial=True,
    fused_loss=False,
    experts=True,
    optimizers=frozenset({ADAMW.name, ADAMW_BF16.name, SGD.name}),
    more=_more,
    write=_write,
    notes=_notes,
)
