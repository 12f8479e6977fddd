"""torchtitan's options, or its older TOML files, as a layout to price."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import replace
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import GPIPE, ONE_F_ONE_B, ModelSpec
from galvatron.planner.exchange.reading import Reading, check_spelling, check_stages, is_whole
from galvatron.planner.exchange.uniform import Recompute, Sharding, Uniform, check_shape
from galvatron.planner.plan.options import Setup

__all__ = ["read_torchtitan", "torchtitan_setup"]

_PARALLELISM = frozenset({
    "pipeline_parallel_degree", "data_parallel_replicate_degree", "data_parallel_shard_degree",
    "fsdp_reshard_after_forward", "tensor_parallel_degree", "expert_parallel_degree", "pipeline_parallel_schedule",
    "pipeline_parallel_microbatch_size", "module_fqns_per_model_part", "enable_sequence_parallel",
    "context_parallel_degree", "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
})  # fmt: skip
_TRAINING = frozenset({"local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param"})
_PRICED = frozenset({f"parallelism.{name}" for name in _PARALLELISM} | {f"training.{name}" for name in _TRAINING})
_NO_PART = (
    "module", "config", "job.", "profiling.", "profiler.", "metrics.", "optimizer.", "lr_scheduler.", "checkpoint.",
    "validation.", "validator.", "experimental.", "comm.", "debug.", "model.", "dataloader.", "hf_assets_path",
    "dump_folder", "training.steps", "training.max_norm", "training.dataset", "training.seed", "training.gc_",
    "training.disable_cuda_graphs", "activation_checkpoint.",
)  # fmt: skip
_REFUSED = {
    "training.enable_cpu_offload": "states on the host are not priced",
    "parallelism.pipeline_parallel_schedule_csv": "a schedule in a file is not read",
}
_UNPRICED = (
    "compile.", "float8.", "mx.", "quantize.", "parallelism.enable_", "parallelism.expert_tensor_parallel_degree",
    "parallelism.pipeline_parallel_layers_per_stage", "training.mixed_precision_reduce", "training.dtype",
)  # fmt: skip
"""Beginnings of those that change the speed or the memory of a run by what is not priced."""
_SCHEDULES = {"1f1b": ONE_F_ONE_B, "gpipe": GPIPE}
_GRADES = {"none": Recompute.NONE, "full": Recompute.FULL, "selective": Recompute.SELECTIVE}

Options = dict[str, Any]
"""Values by ``section.name``; ``activation_checkpoint.mode`` is what is recomputed."""


def torchtitan_setup(text: str, devices: int) -> Setup:
    """What options say of training."""
    options = _options(text)
    data, _, _ = _degrees(options, devices)
    setup = Setup(
        batch=_batch(options, data),
        precision="fp32" if options.get("training.mixed_precision_param") == "float32" else "bf16",
    )
    if "training.seq_len" in options:
        setup["sequence_length"] = _whole(options, "training.seq_len", 1)
    return setup


def read_torchtitan(text: str, model: ModelSpec, devices: int) -> Reading:
    """The layout that options say, for a model on so many devices."""
    options = _options(text)
    check_shape(model)
    data, tensor, pipeline = _degrees(options, devices)
    batch = _batch(options, data)
    local = _whole(options, "training.local_batch_size", 0)
    sample = _whole(options, "parallelism.pipeline_parallel_microbatch_size", 1) if pipeline > 1 else local
    if batch % (local * data):
        raise InvalidInput(f"from: {batch} samples are no multiple of {local} on each of {data} data-parallel ranks")
    if local % sample:
        raise InvalidInput(
            f"from: training.local_batch_size {local} is no multiple of pipeline_parallel_microbatch_size {sample}; "
            "torchtitan would refuse it too"
        )
    name = str(options.get("parallelism.pipeline_parallel_schedule", "1F1B"))
    if pipeline > 1 and name.lower() not in _SCHEDULES:
        raise InvalidInput(f"from: schedule {name} cannot be priced; expected 1F1B or GPipe")
    schedule = _SCHEDULES.get(name.lower(), ONE_F_ONE_B)
    replicas = _whole(options, "parallelism.data_parallel_replicate_degree", 1)
    sharding, remarks = _sharding(options, data // replicas, pipeline)
    if pipeline > 1 and batch > local * data:
        drained = f"the pipeline drains after each of {batch // (local * data)} accumulation steps: priced as once"
        remarks = (*remarks, drained)
    zero = sharding in (Sharding.OPTIMIZER, Sharding.GRADIENTS)
    if zero and replicas > 1:
        raise InvalidInput(
            f"from: {replicas} replicas of {data // replicas} shards that keep parameters whole cannot be priced"
        )
    blocks = _blocks(options, pipeline, len(model.layers) - 2)
    check_stages(blocks)
    layout = Uniform(
        batch=batch,
        micro_batches=batch // (sample * data),
        pipeline=pipeline,
        blocks=blocks,
        schedule=schedule.name,
        replicas=replicas,
        shards=data // replicas,
        sharding=sharding,
        tensor=tensor,
        sequence_parallel=tensor > 1 and options.get("parallelism.enable_sequence_parallel", True) is True,
        expert=_whole(options, "parallelism.expert_parallel_degree", 1),
        fused_loss=model.layers[-1].fused_loss is not None,
    )
    if not layout.divides or (layout.expert > 1 and not model.has_experts):
        raise InvalidInput(f"from: {layout.expert}-way expert parallelism does not divide {model.name} on a stage")
    if not schedule.runs(pipeline, layout.micro_batches):
        raise InvalidInput(f"from: {layout.micro_batches} micro-batches on {pipeline} stages cannot be priced")
    layout, said = _recomputed(layout, options)
    others = [name for name in options if name not in _PRICED | _REFUSED.keys() and not name.startswith(_NO_PART)]
    speed = [name for name in others if name.startswith(_UNPRICED)]
    return Reading(
        layout=layout,
        schedule=schedule,
        remarks=(*remarks, *said, *(["the loss is priced in chunks, as recipes have it"] * layout.fused_loss)),
        unpriced=tuple(speed),
        unknown=tuple(name for name in others if name not in speed),
    )


def _options(text: str) -> Options:
    """Raises for what cannot be read, for a misspelt option of the layout, and for one that cannot be priced."""
    options = _parsed(text)
    for name, value in options.items():
        if name in _REFUSED and value not in (False, "False"):
            raise InvalidInput(f"from: --{name} cannot be priced: {_REFUSED[name]}; drop it")
        if name not in _PRICED | _REFUSED.keys() and not name.startswith((*_NO_PART, *_UNPRICED)):
            check_spelling(name, _PRICED, "torchtitan", "--")
    return options


def _parsed(text: str) -> Options:
    if not text.lstrip().startswith("-"):
        try:
            sections = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidInput(f"from: the text is neither options nor TOML: {error}") from None
        return {
            f"{section}.{name}": value
            for section, values in sections.items()
            for name, value in (values.items() if isinstance(values, dict) else [("", values)])
        }
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InvalidInput(f"from: the options cannot be read: {error}; quote them as for a shell") from None
    options: Options = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            section, _, last = name.rpartition(".")
            if last.startswith("no_"):
                name, options[f"{section}.{last[3:]}"] = "", False
            else:
                options[name] = value if equals else True
        elif word.startswith("activation-checkpoint:"):
            name, options["activation_checkpoint.mode"] = "", word.partition(":")[2]
        elif not name:
            raise InvalidInput(f"from: {word!r} belongs to no option")
        else:
            before = options[name]
            options[name] = word if before is True else [*(before if isinstance(before, list) else [before]), word]
    return options


def _whole(options: Options, name: str, default: int) -> int:
    value = options.get(name, default)
    if isinstance(value, str) and is_whole(value.removeprefix("-")):
        value = int(value)
    if type(value) is not int or (value < 1 and value != default):
        raise InvalidInput(f"from: {name} is {value!r}; expected a whole number from 1 on")
    return value


def _degrees(options: Options, devices: int) -> tuple[int, int, int]:
    """Data-parallel ranks, TP and PP."""
    if _whole(options, "parallelism.context_parallel_degree", 1) > 1:
        raise InvalidInput("from: context_parallel_degree cannot be priced yet; drop it")
    tensor = _whole(options, "parallelism.tensor_parallel_degree", 1)
    pipeline = _whole(options, "parallelism.pipeline_parallel_degree", 1)
    replicas = _whole(options, "parallelism.data_parallel_replicate_degree", 1)
    shards = _whole(options, "parallelism.data_parallel_shard_degree", -1)
    known = tensor * pipeline * replicas
    shards = devices // known if shards == -1 else shards
    if known * shards != devices:
        raise InvalidInput(
            f"from: {replicas} replicas × {shards} shards × TP {tensor} × PP {pipeline} are not the cluster's "
            f"{devices} devices; give a cluster of as many devices as the run has"
        )
    return replicas * shards, tensor, pipeline


def _batch(options: Options, data: int) -> int:
    if "training.local_batch_size" not in options:
        raise InvalidInput("from: training.local_batch_size is not said, and the recipe's is not known; give it")
    local = _whole(options, "training.local_batch_size", 1) * data
    batch = _whole(options, "training.global_batch_size", -1)
    return local if batch == -1 else batch


def _sharding(options: Options, shards: int, pipeline: int) -> tuple[Sharding, tuple[str, ...]]:
    if shards == 1:
        return Sharding.NONE, ()
    if pipeline > 1:
        said = "pipeline stages keep parameters and gradients whole until the last micro-batch: priced as ZeRO-1"
        return Sharding.OPTIMIZER, (said,)
    kept = options.get("parallelism.fsdp_reshard_after_forward", "default") == "never"
    return Sharding.GRADIENTS if kept else Sharding.PARAMETERS, ()


def _blocks(options: Options, pipeline: int, blocks: int) -> tuple[int, ...]:
    """Blocks of each stage: as listed, or as torchtitan spreads them, with embedding and head counted as so many."""
    listed = options.get("parallelism.module_fqns_per_model_part")
    if pipeline == 1:
        return (blocks,)
    if listed is not None:
        stages = [stage.split(",") if isinstance(stage, str) else stage for stage in _listed(listed)]
        counts = tuple(sum(str(module).startswith("layers.") for module in stage) for stage in stages)
        if len(counts) != pipeline or sum(counts) != blocks:
            raise InvalidInput(f"from: module_fqns_per_model_part lists {sum(counts)} blocks in {len(counts)} stages")
        return counts
    first = _whole(options, "parallelism.pipeline_parallel_first_stage_less_layers", 1)
    last = _whole(options, "parallelism.pipeline_parallel_last_stage_less_layers", 1)
    each, more = divmod(blocks + first + last, pipeline)
    counts_ = [each + (stage < more) for stage in range(pipeline)]
    counts_[0] -= first
    counts_[-1] -= last
    return tuple(counts_)


def _listed(stages: Any) -> list[Any]:
    """The modules of each stage: several values of an option, or a list of lists in TOML."""
    stages = [stages] if isinstance(stages, str) else stages
    if isinstance(stages, list) and all(isinstance(stage, str | list) for stage in stages):
        return stages
    raise InvalidInput(
        f"from: module_fqns_per_model_part is {stages!r}; expected the modules of each stage by commas, such as "
        "tok_embeddings,layers.0 layers.1,norm,lm_head"
    )


def _recomputed(layout: Uniform, options: Options) -> tuple[Uniform, tuple[str, ...]]:
    mode = options.get("activation_checkpoint.mode")
    if mode is None:
        return layout, ("what is recomputed is not said, and the recipe's is not known: priced as nothing",)
    if mode not in _GRADES:
        raise InvalidInput(f"from: activation checkpointing {mode!r} cannot be priced; expected {', '.join(_GRADES)}")
    said = "selective checkpointing is priced with all matrix products kept, of which torchtitan keeps every second"
    if mode == "selective" and layout.expert > 1:
        return replace(layout, recompute=Recompute.FULL), ("selective checkpointing of experts is priced as full",)
    return replace(layout, recompute=_GRADES[mode]), (said,) if mode == "selective" else ()
