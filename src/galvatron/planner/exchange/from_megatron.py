"""Megatron-LM's flags as a layout to price."""

from __future__ import annotations

import re
from dataclasses import replace

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ONE_F_ONE_B, Attention, ModelSpec, Schedule
from galvatron.core.spec.optimizer import ADAMW, SGD
from galvatron.planner.exchange.flag_table import MODEL_FLAGS, Flags, flag_kind, parse_flags
from galvatron.planner.exchange.interleaved import interleaved
from galvatron.planner.exchange.reading import Reading, check_stages, is_whole
from galvatron.planner.exchange.uniform import Recompute, Sharding, Uniform, check_shape
from galvatron.planner.plan.options import Setup

__all__ = ["megatron_setup", "read_megatron"]

_FSDP = {
    "no_shard": Sharding.NONE,
    "optim": Sharding.OPTIMIZER,
    "optim_grads": Sharding.GRADIENTS,
    "optim_grads_params": Sharding.PARAMETERS,
}
_WHOLE_PARTS = frozenset({"mlp", "moe", "shared_experts"})
"""Parts of a block that selective recompute runs whole again."""


def megatron_setup(text: str, devices: int) -> Setup:
    """What flags say of training: batch, length, precision, optimizer."""
    flags = parse_flags(text)
    optimizer = _text(flags, "optimizer", "adam")
    if optimizer not in ("adam", "sgd"):
        raise InvalidInput(f"from: --optimizer {optimizer} cannot be priced; expected adam or sgd")
    setup = Setup(
        batch=_number(flags, "global-batch-size", _number(flags, "micro-batch-size", 1) * _data(flags, devices)),
        precision="bf16" if {"bf16", "fp16"} & set(flags) else "fp32",
        optimizer=SGD.name if optimizer == "sgd" else ADAMW.name,
    )
    if "seq-length" in flags:
        setup["sequence_length"] = _number(flags, "seq-length", 0)
    return setup


def read_megatron(text: str, model: ModelSpec, devices: int) -> Reading:
    """The layout that flags say, for a model on so many devices."""
    flags = parse_flags(text)
    check_shape(model)
    _check_model(flags, model)
    data = _data(flags, devices)
    tensor = _number(flags, "tensor-model-parallel-size", 1)
    pipeline = _number(flags, "pipeline-model-parallel-size", 1)
    batch = _number(flags, "global-batch-size", _number(flags, "micro-batch-size", 1) * data)
    sample = _number(flags, "micro-batch-size", 1) * data
    if batch % sample:
        raise InvalidInput(
            f"from: --global-batch-size {batch} is no multiple of --micro-batch-size times the {data} data-parallel "
            f"ranks ({sample}); Megatron-LM would refuse it too"
        )
    chunks, blocks = _cuts(flags, pipeline, len(model.layers) - 2)
    check_stages(blocks)
    sharding = _sharding(flags) if data > 1 else Sharding.NONE
    expert = _number(flags, "expert-model-parallel-size", 1)
    expert_tensor = _number(flags, "expert-tensor-parallel-size", tensor)
    layout = Uniform(
        batch=batch,
        micro_batches=batch // sample,
        pipeline=pipeline,
        blocks=blocks,
        replicas=data if sharding is Sharding.NONE else 1,
        shards=1 if sharding is Sharding.NONE else data,
        sharding=sharding,
        tensor=tensor,
        sequence_parallel="sequence-parallel" in flags and tensor > 1,
        expert=expert,
        expert_tensor=expert_tensor if expert > 1 else 1,
    )
    _check_experts(layout, model, expert_tensor)
    layout, remarks = _recomputed(layout, flags, model)
    schedule = interleaved(chunks) if chunks > 1 else ONE_F_ONE_B
    _check_schedule(schedule, layout)
    return Reading(
        layout=layout,
        schedule=schedule,
        remarks=(*remarks, *_remarks(flags, layout, chunks)),
        unpriced=tuple(f"--{name}" for name in flags if flag_kind(name) == "unpriced"),
        unknown=tuple(f"--{name}" for name in flags if flag_kind(name) == "unknown"),
    )


def _number(flags: Flags, name: str, default: int) -> int:
    values = flags.get(name)
    if values is None:
        return default
    if len(values) != 1 or not is_whole(values[0]) or not int(values[0]):
        raise InvalidInput(f"from: --{name} {' '.join(values)} given; expected a whole number from 1 on")
    return int(values[0])


def _text(flags: Flags, name: str, default: str) -> str:
    values = flags.get(name, (default,))
    if len(values) != 1:
        raise InvalidInput(f"from: --{name} {' '.join(values)} given; expected one value")
    return values[0]


def _data(flags: Flags, devices: int) -> int:
    """Data-parallel ranks: what the other degrees leave of the devices."""
    if _number(flags, "context-parallel-size", 1) > 1:
        raise InvalidInput("from: --context-parallel-size cannot be priced yet; drop it")
    tensor = _number(flags, "tensor-model-parallel-size", 1)
    pipeline = _number(flags, "pipeline-model-parallel-size", 1)
    if devices % (tensor * pipeline):
        raise InvalidInput(
            f"from: TP {tensor} × PP {pipeline} does not divide the cluster's {devices} devices; give a cluster of as "
            "many devices as the run has"
        )
    return devices // (tensor * pipeline)


def _check_model(flags: Flags, model: ModelSpec) -> None:
    """Flags of the model must be the model's."""
    config = dict(model.config or {})
    known = {
        flag: next((config[name] for name in names if config.get(name)), None) for flag, names in MODEL_FLAGS.items()
    }
    known["num-layers"] = len(model.layers) - 2
    for flag, value in known.items():
        if flag in flags and isinstance(value, int) and _number(flags, flag, 1) != value:
            raise InvalidInput(
                f"from: --{flag} {' '.join(flags[flag])} given, but {model.name} has {value}; give the model that the "
                "flags describe"
            )


def _sharding(flags: Flags) -> Sharding:
    strategy = _text(flags, "data-parallel-sharding-strategy", "no_shard")
    if strategy not in _FSDP:
        raise InvalidInput(
            f"from: --data-parallel-sharding-strategy {strategy} given; expected one of {', '.join(_FSDP)}"
        )
    if "use-megatron-fsdp" in flags or "use-custom-fsdp" in flags:
        return _FSDP[strategy]
    if "use-torch-fsdp2" in flags:
        return Sharding.PARAMETERS
    return Sharding.OPTIMIZER if "use-distributed-optimizer" in flags else Sharding.NONE


def _check_experts(layout: Uniform, model: ModelSpec, expert_tensor: int) -> None:
    if layout.expert > 1 and not model.has_experts:
        raise InvalidInput(f"from: --expert-model-parallel-size {layout.expert} given, but {model.name} has no experts")
    if layout.expert == 1 and model.has_experts and expert_tensor != layout.tensor:
        raise InvalidInput(
            f"from: --expert-tensor-parallel-size {expert_tensor} without expert parallelism cannot be priced where TP "
            f"is {layout.tensor}; expected the same"
        )
    if layout.expert > 1 and layout.sequence_parallel and layout.expert_tensor > 1:
        raise InvalidInput(
            f"from: --expert-tensor-parallel-size {layout.expert_tensor} beside --sequence-parallel and expert "
            "parallelism cannot be priced; expected 1"
        )
    if not layout.divides:
        raise InvalidInput(
            f"from: {layout.expert}-way expert parallelism (with {layout.expert_tensor}-way TP inside) does not divide "
            f"the {layout.data * layout.tensor} devices of a stage"
        )


def _cuts(flags: Flags, pipeline: int, blocks: int) -> tuple[int, tuple[int, ...]]:
    """Chunks of each stage, and the blocks of each stage."""
    if "pipeline-model-parallel-layout" in flags:
        return _written_cuts(_text(flags, "pipeline-model-parallel-layout", ""), pipeline, blocks)
    chunks = _number(flags, "num-virtual-stages-per-pipeline-rank", 1)
    if "num-layers-per-virtual-pipeline-stage" in flags:
        size = _number(flags, "num-layers-per-virtual-pipeline-stage", 1) * pipeline
        if blocks % size:
            raise InvalidInput(
                f"from: --num-layers-per-virtual-pipeline-stage times {pipeline} stages ({size}) does not divide the "
                f"model's {blocks} blocks"
            )
        chunks = blocks // size
    first = _number(flags, "decoder-first-pipeline-num-layers", 0) if pipeline > 1 else 0
    last = _number(flags, "decoder-last-pipeline-num-layers", 0) if pipeline > 1 else 0
    fewer_first = int("account-for-embedding-in-pipeline-split" in flags)
    fewer_last = int("account-for-loss-in-pipeline-split" in flags)
    middle = pipeline - bool(first) - bool(last)
    left = blocks + fewer_first + fewer_last - first - last
    if middle < 0 or left < 0 or (left % middle if middle else left):
        raise InvalidInput(
            f"from: {blocks} blocks do not divide into {pipeline} stages as the flags say; change "
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or "
            "--pipeline-model-parallel-layout"
        )
    counts = [*([first] * bool(first)), *([left // middle if middle else 0] * middle), *([last] * bool(last))]
    counts[0] -= fewer_first
    counts[-1] -= fewer_last
    return chunks, tuple(counts)


def _written_cuts(text: str, pipeline: int, blocks: int) -> tuple[int, tuple[int, ...]]:
    """``Et*3|(tt|)*2tL``: of parts in turn the stages' chunks."""
    whole = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*([0-9]{1,3})(?![0-9])", r"(.)\*([0-9]{1,3})(?![0-9])"):
        whole = re.sub(pattern, lambda match: match[1] * int(match[2]), whole)
    parts = whole.split("|")
    in_order = re.fullmatch(r"E[t|]*L", whole) is not None
    if not in_order or len(parts) % pipeline or whole.count("t") != blocks:
        raise InvalidInput(
            f"from: --pipeline-model-parallel-layout {text} given; expected E, {blocks} times t, and L in a multiple "
            f"of {pipeline} parts"
        )
    counts = tuple(sum(part.count("t") for part in parts[stage::pipeline]) for stage in range(pipeline))
    return len(parts) // pipeline, counts


def _recomputed(layout: Uniform, flags: Flags, model: ModelSpec) -> tuple[Uniform, tuple[str, ...]]:
    """With what is recomputed, and what of that is priced as something near."""
    grade = "selective" if "recompute-activations" in flags else _text(flags, "recompute-granularity", "none")
    if grade == "none":
        return layout, ()
    if grade == "full":
        count = _number(flags, "recompute-num-layers", 1)
        if _text(flags, "recompute-method", "uniform") == "block":
            return replace(layout, recompute=Recompute.FULL, recomputed=min(count, max(layout.blocks))), ()
        said = f"--recompute-num-layers {count} keeps one input for {count} blocks, and is priced as one for each block"
        return replace(layout, recompute=Recompute.FULL), (said,) if count > 1 else ()
    if grade != "selective":
        raise InvalidInput(f"from: --recompute-granularity {grade} given; expected full or selective")
    parts = set(flags.get("recompute-modules", ("core_attn",)))
    if parts == {"core_attn"}:
        fused = model.training.attention is Attention.FUSED
        why = "fused attention keeps no maps that it could save" if fused else "the maps are priced as kept"
        return layout, (f"selective recompute of attention is priced as none: {why}",)
    wanted = Recompute.BUT_ATTENTION if parts & _WHOLE_PARTS else Recompute.SELECTIVE
    known = all(
        block.selective is not None if wanted is Recompute.SELECTIVE else block.but_attention is not None
        for block in model.layers[1:-1]
    )
    nearest = wanted if known and layout.expert == 1 else Recompute.FULL
    said = f"recompute of {', '.join(sorted(parts))} is priced as recompute of {nearest}"
    return replace(layout, recompute=nearest), (said,)


def _check_schedule(schedule: Schedule, layout: Uniform) -> None:
    if not schedule.runs(layout.pipeline, layout.micro_batches):
        wanted = f"a multiple of {layout.pipeline}" if schedule.chunks > 1 else f"at least {layout.pipeline}"
        raise InvalidInput(
            f"from: {layout.micro_batches} micro-batches on {layout.pipeline} stages cannot be priced under "
            f"{schedule.title}; expected {wanted}"
        )


def _remarks(flags: Flags, layout: Uniform, chunks: int) -> tuple[str, ...]:
    said = []
    if not {"bf16", "fp16"} & set(flags):
        said.append("without --bf16 or --fp16 Megatron computes in fp32, and so it is priced")
    if "fp16" in flags:
        said.append("fp16 is priced as bf16, whose bytes and speed are the same")
    if layout.sharding is Sharding.OPTIMIZER:
        said.append("the distributed optimizer is priced as ZeRO-1: whole gradients, reduced once an iteration")
    if (
        layout.data > 1
        and "overlap-grad-reduce" not in flags
        and layout.sharding in (Sharding.NONE, Sharding.OPTIMIZER)
    ):
        said.append("gradients are priced as reduced beside backward, which --overlap-grad-reduce would do")
    if chunks > 1:
        said.append(f"of the transfers between {chunks} chunks a stage those of one are priced")
    return tuple(said)
