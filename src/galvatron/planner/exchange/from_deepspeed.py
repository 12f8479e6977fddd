"""DeepSpeed's configuration as a layout to price. It says nothing of pipelines or of what is recomputed."""

from __future__ import annotations

import json
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ONE_F_ONE_B, ModelSpec
from galvatron.core.spec.optimizer import ADAMW, SGD
from galvatron.planner.exchange.deepspeed import STAGES
from galvatron.planner.exchange.reading import Reading, check_spelling
from galvatron.planner.exchange.uniform import Sharding, Uniform, check_shape
from galvatron.planner.plan.options import Setup

__all__ = ["deepspeed_setup", "read_deepspeed"]

_PRICED = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization", "bf16",
    "bfloat16", "fp16", "tensor_parallel", "optimizer",
})  # fmt: skip
_NO_PART = frozenset({
    "scheduler", "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard", "wandb",
    "csv_monitor", "comms_logger", "flops_profiler", "checkpoint", "zero_allow_untested_optimizer",
    "prescale_gradients", "gradient_predivide_factor", "seed", "data_types",
    "communication_data_type", "zero_force_ds_cpu_optimizer",
})  # fmt: skip
_NOT_PRICED = frozenset({"activation_checkpointing", "aio", "compile", "torch_autocast", "sparse_gradients", "amp"})
_ZERO = frozenset(
    {"stage", "contiguous_gradients", "reduce_scatter", "round_robin_gradients", "ignore_unused_parameters"}
)


def deepspeed_setup(text: str, devices: int) -> Setup:
    """What a configuration says of training."""
    config = _config(text)
    tensor = _tensor(config, devices)
    half = any(_enabled(config, name) for name in ("bf16", "bfloat16", "fp16"))  # the second is the older name
    optimizer = str(_section(config, "optimizer").get("type", "AdamW")).lower()
    if optimizer not in ("adam", "adamw", "sgd"):
        raise InvalidInput(f"from: optimizer.type {optimizer!r} cannot be priced; expected Adam, AdamW or SGD")
    batch, _, _ = _batches(config, devices // tensor, tensor)
    return Setup(
        batch=batch,
        precision="bf16" if half else "fp32",
        optimizer=SGD.name if optimizer == "sgd" else ADAMW.name,
    )


def read_deepspeed(text: str, model: ModelSpec, devices: int) -> Reading:
    """The layout that a configuration says, for a model on so many devices."""
    config = _config(text)
    check_shape(model)
    tensor = _tensor(config, devices)
    data = devices // tensor
    batch, _, steps = _batches(config, data, tensor)
    zero = _section(config, "zero_optimization")
    for name, value in zero.items():
        if name.startswith("offload_") and isinstance(value, dict) and value.get("device", "none") != "none":
            raise InvalidInput(f"from: zero_optimization.{name} cannot be priced; drop it")
        if name == "zero_hpz_partition_size" and value not in (0, 1):
            raise InvalidInput(f"from: zero_optimization.{name} {value} cannot be priced; drop it")
    stage = _whole(zero, "stage", 0) if zero else 0
    sharding = next((each for each, number in STAGES.items() if number == stage), None)
    if sharding is None:
        raise InvalidInput(f"from: zero_optimization.stage {stage} given; expected 0 to 3")
    sharding = sharding if data > 1 else Sharding.NONE
    layout = Uniform(
        batch=batch,
        micro_batches=steps,
        blocks=(len(model.layers) - 2,),
        replicas=data if sharding is Sharding.NONE else 1,
        shards=1 if sharding is Sharding.NONE else data,
        sharding=sharding,
        tensor=tensor,
    )
    remarks = ["the file does not say what is recomputed: priced as nothing"]
    if tensor > 1:
        remarks.append("AutoTP is priced with a split vocabulary and without sequence parallelism")
    if _enabled(config, "fp16"):
        remarks.append("fp16 is priced as bf16, whose bytes and speed are the same")
    keys = [key for key in config if key not in _PRICED | _NO_PART]
    for key in keys:
        check_spelling(key, _PRICED, "DeepSpeed")
    inside = [f"zero_optimization.{key}" for key in zero if key not in _ZERO]
    return Reading(
        layout=layout,
        schedule=ONE_F_ONE_B,
        remarks=tuple(remarks),
        unpriced=(*inside, *(key for key in keys if key in _NOT_PRICED)),
        unknown=tuple(key for key in keys if key not in _NOT_PRICED),
    )


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"from: the configuration is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidInput("from: the configuration is no JSON object; expected a DeepSpeed configuration")
    return config


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, dict):
        raise InvalidInput(f"from: {name} is {section!r}; expected an object")
    return section


def _enabled(config: dict[str, Any], name: str) -> bool:
    value = _section(config, name).get("enabled", False)
    if not isinstance(value, bool):
        raise InvalidInput(
            f"from: {name}.enabled is {value!r}; expected true or false (not auto, which its trainer fills in)"
        )
    return value


def _whole(section: dict[str, Any], name: str, default: int) -> int:
    value = section.get(name, default)
    if type(value) is not int or value < 0:
        raise InvalidInput(f"from: {name} is {value!r}; expected a whole number (not auto, which its trainer fills in)")
    return value


def _tensor(config: dict[str, Any], devices: int) -> int:
    tensor = max(1, _whole(_section(config, "tensor_parallel"), "autotp_size", 1))
    if devices % tensor:
        raise InvalidInput(
            f"from: tensor_parallel.autotp_size {tensor} does not divide the cluster's {devices} devices"
        )
    return tensor


def _batches(config: dict[str, Any], data: int, tensor: int) -> tuple[int, int, int]:
    """Samples of an iteration, of a micro-batch on one rank, and the micro-batches; two of them say the third.
    DeepSpeed counts the ranks of AutoTP into ``train_batch_size``."""
    whole = _whole(config, "train_batch_size", 0)
    micro = _whole(config, "train_micro_batch_size_per_gpu", 0)
    steps = _whole(config, "gradient_accumulation_steps", 0)
    if whole and whole % tensor == 0:
        whole //= tensor
    if not whole and not micro:
        raise InvalidInput("from: neither train_batch_size nor train_micro_batch_size_per_gpu is said; give one")
    if not micro:
        micro = whole // (data * (steps or 1))
    steps = steps or (whole // (micro * data) if whole and micro else 1)
    whole = whole or micro * steps * data
    if not micro or whole != micro * steps * data:
        raise InvalidInput(
            f"from: {whole} samples are not {micro} a device × {steps} steps × {data} data-parallel ranks; DeepSpeed "
            "would refuse it too"
        )
    return whole, micro, steps
