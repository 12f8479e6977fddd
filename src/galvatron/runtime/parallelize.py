"""From a model and a plan to one rank's share of it: the runtime's entry."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeGuard, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Precision
from galvatron.families.adapter_weights import AdaptedWeights
from galvatron.families.altered import altered_modules
from galvatron.families.build import build_meta, read_config, without_weights
from galvatron.families.configurations import different_fields
from galvatron.families.documents import attend_by_document
from galvatron.families.generic.adapter import Generic
from galvatron.families.generic.image_examples import example_of
from galvatron.families.generic.own_module import InputsFunction, check_sum, own_module
from galvatron.families.given import as_stock, keep_in_evaluation
from galvatron.families.layer import LayeredModel
from galvatron.families.lora import add_adapters, has_adapters, without_peft
from galvatron.families.registry import layered_model
from galvatron.families.saved import SavedWeights, load_buffers
from galvatron.families.smoothing import smooth_labels
from galvatron.families.tuning import check_frozen, freeze
from galvatron.families.weights import InitialWeights, ModelWeights, Weights
from galvatron.planner.plan.plan import Plan
from galvatron.processes.failures import report_failures, report_input
from galvatron.processes.world import cap_memory, join, own_device
from galvatron.runtime.assembly import sums_rows
from galvatron.runtime.buffer_types import buffers_follow
from galvatron.runtime.build import build
from galvatron.runtime.checks import check_model, check_schedule, check_unaltered, check_world, uses
from galvatron.runtime.compiled import compiles
from galvatron.runtime.drawing import draws
from galvatron.runtime.float8 import check_float8
from galvatron.runtime.model import ParallelModel
from galvatron.runtime.products import check_tf32, tf32_of
from galvatron.runtime.same_start import start_alike
from galvatron.runtime.settings import ComputeSettings
from galvatron.runtime.verify import verify

__all__ = ["ParallelizeOptions", "parallelize"]

_LOG = logging.getLogger(__name__)
_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp64": torch.float64, "float64": torch.float64,
}  # fmt: skip
Model: TypeAlias = nn.Module | PreTrainedConfig | Mapping[str, Any] | None


class ParallelizeOptions(TypedDict, total=False):
    """What may be said besides model and plan."""

    weights: str | Path | Weights | None
    """A folder of safetensors to start from, or another source. Without it, and without weights in the model, they are
    initialised from ``seed``, to the same values under any plan."""
    adapters: str | Path | None
    """For a plan with low-rank adapters: a folder, as peft writes it, of adapters to start from."""
    device: torch.device | str | None
    seed: int
    dtype: torch.dtype | str | None
    """Compute in this ("bf16", "fp32", "fp64") instead of the plan's precision."""
    example: Any
    """For models of unknown family and modules of your own: a batch, in any form (a dictionary, a tuple, nested)."""
    loss: Callable[[Any, Any], Tensor] | None
    """In place of the cross-entropy of logits and labels: of the model's output and the batch, summed over the targets.
    It is divided by the number of labels that count, or of samples where a batch has no ``labels``."""
    inputs: InputsFunction | None
    """From a batch to what the model is called with: keywords, arguments, or one."""
    documents: bool
    """Whether rows hold several documents, each with positions that start anew: GPUs then attend document by document
    (FlexAttention) where the stock model can; elsewhere a mask keeps them apart. Default False."""
    label_smoothing: float
    """Share of each target that all words have in equal parts, in the loss of training and of evaluation; default 0."""
    check: bool | None
    """First compare loss and gradients of a tiny copy under the plan with the stock model's own (see
    :mod:`galvatron.runtime.verify`), which takes seconds; None: only for models of unknown family."""


def parallelize(model: Model, plan: Plan, **options: Unpack[ParallelizeOptions]) -> ParallelModel:
    """This rank's share of a model under a plan. Call it on every rank, as under ``torchrun``.

    ``model``: a stock Hugging Face model (its weights on rank 0 are used, unless it is on the meta device), a
    ``PeftModel`` with LoRA adapters, a configuration, or None for the one the plan was made for. For the options see
    :class:`ParallelizeOptions`. Raises :class:`galvatron.InvalidInput` before anything is allocated if model, plan and
    number of processes do not go together, and :class:`galvatron.Unequal` if the comparison with the stock model fails.
    """
    unknown = options.keys() - ParallelizeOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"parallelize() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    if not isinstance(plan, Plan):
        raise InvalidInput(f"plan: a {type(plan).__name__} given; expected a plan of galvatron.plan or Plan.load")
    report_input()
    join(alone=sum(len(stage.devices) for stage in plan.stages) == 1, in_turn=len(plan.stages) == 1)
    report_failures()
    check_world(plan, dist.get_world_size())
    check_schedule(plan)
    example, loss, seed = options.get("example"), options.get("loss"), options.get("seed", 0)
    if loss is not None and plan.model.family != "generic":
        raise InvalidInput(
            f"loss: given, but the plan was made for {plan.model.name!r} with its own loss; describe the model "
            "(galvatron.describe) and plan for that"
        )
    if isinstance(model, nn.Module):
        model = without_peft(as_stock(model))
    evaluates = isinstance(model, nn.Module) and not model.training
    start_alike(
        model if options.get("weights") is None and _has_values(model) else None,
        _place(options.get("device")),
        seeded=options.get("weights") is None,
    )
    own = own_module(model, example, loss, options.get("inputs")) if isinstance(model, nn.Module) else None
    if own is not None:
        model, example, loss = own.model, own.example, own.loss
        model.training = not evaluates
        check_sum(own)
    elif options.get("inputs") is not None:
        raise InvalidInput("inputs: given without a model in memory; give parallelize the module that they are for")
    stock = _stock(model, plan)
    wide = options.get("dtype") in (torch.float64, "fp64")  # for which FlexAttention has no kernel
    if options.get("documents") and _place(options.get("device")).type == "cuda" and not wide:
        kept = uses(plan, "selective_recompute", "recompute_but_attention")
        attend_by_document(stock, plan.model.training, keeps_some=kept)
    if isinstance(options.get("weights"), str | Path):
        load_buffers(stock, str(options["weights"]))  # before layers have copies of them
    if example is None:
        example = example_of(stock, plan.model.training)
    lora, generic = plan.model.training.lora, plan.model.family == "generic"
    plain = None
    if lora is not None and not has_adapters(stock):
        plain = layered_model(without_weights(stock), example, loss, generic=generic)
        add_adapters(stock, lora)
    freeze(stock, plan.model.training)
    layered = layered_model(stock, example, loss, generic=generic)
    check_model(plan, layered)
    if isinstance(model, nn.Module):
        check_unaltered(plan, layered, altered_modules(model))
        plan = _configured(plan, model)
    smooth_labels(layered, options.get("label_smoothing", 0.0))
    source = _weights(plain or layered, model, options.get("weights"), seed)
    if plain is not None:
        adapters = options.get("adapters")
        source = AdaptedWeights(layered, plain, source, seed, None if adapters is None else Path(adapters))
    elif options.get("adapters") is not None:
        raise InvalidInput(
            "adapters: given, but the plan was made without any, or the model has its own; plan for them"
        )
    settings = _settings(plan, options.get("device"), options.get("dtype"), seed)
    settings = replace(settings, buffers_follow=buffers_follow(layered, settings.dtype))
    if uses(plan, "float8"):
        check_float8(settings.device)
    if settings.compile and sums_rows(layered) and dist.get_rank() == 0:
        _LOG.warning("layers are not compiled: the loss has a term for the balance of experts, taken from inside them")
    check = options.get("check")
    if isinstance(layered, Generic) if check is None else check:
        given = model if isinstance(model, nn.Module) and plain is None else stock
        rules = layered.tensor_rules if isinstance(layered, Generic) else None
        verify(given, plan, device=settings.device, example=example, loss=loss, rules=rules)
    cap_memory(settings.device, plan.memory_budget_bytes - plan.cluster.facts.reserved_bytes)
    made = build(plan, layered, settings, source)
    if evaluates:
        made.eval()
        if dist.get_rank() == 0 and any(draws(layer.drawing_modules()) for layer in layered.layers):
            _LOG.warning(
                "model: is in evaluation mode, as from_pretrained leaves it, so that nothing drops out; call train() "
                "of it before parallelize, or of the parallel model"
            )
    if own is not None:
        made.named_batch = own.named
    return made


def _place(device: torch.device | str | None) -> torch.device:
    return own_device() if device is None else torch.device(device)


def _has_values(model: Model) -> TypeGuard[nn.Module]:
    return isinstance(model, nn.Module) and not any(parameter.is_meta for parameter in model.parameters())


def _settings(
    plan: Plan, device: torch.device | str | None, dtype: torch.dtype | str | None, seed: int
) -> ComputeSettings:
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise InvalidInput(f"dtype: {dtype!r} given; expected one of {', '.join(_DTYPES)}, or a torch.dtype")
        dtype = _DTYPES[dtype]
    planned = torch.bfloat16 if plan.model.training.precision is Precision.BF16 else torch.float32
    place = _place(device)
    if dtype is None:
        check_tf32(plan.model.training.precision, place)
    return ComputeSettings(
        device=place,
        dtype=dtype or planned,
        master_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        seed=seed,
        compile=compiles(plan.model.training.compile, place),
        tf32=tf32_of(plan.model.training.precision) if dtype is None else None,
    )


def _stock(model: Model, plan: Plan) -> nn.Module:
    if isinstance(model, nn.Module) and not any(buffer.is_meta for buffer in model.buffers()):
        if plan.model.training.lora is None or has_adapters(model):
            check_frozen(model, plan.model.training)
        empty: nn.Module = without_weights(model)  # so that nothing of the caller's model is kept alive
        keep_in_evaluation(empty)
        return empty
    if isinstance(model, nn.Module) and not type(model).__module__.startswith("transformers."):
        name = next(name for name, buffer in model.named_buffers() if buffer.is_meta)
        raise InvalidInput(
            f"{type(model).__name__}: its buffer {name} has no values (meta device), and nobody else knows them; build "
            "the model outside of torch.device('meta'), or move its parameters alone there"
        )
    config: Any = plan.model.config if model is None else getattr(model, "config", model)
    if config is None:
        raise InvalidInput(
            f"plan: model {plan.model.name!r} was described by figures alone (model.config is null), so it cannot be "
            "built; give parallelize the model or its configuration"
        )
    return build_meta(config, plan.model.training, as_named=plan.model.family == "generic")


def _configured(plan: Plan, model: nn.Module) -> Plan:
    """The plan with the configuration of the model in memory, with which that is exported; sizes do not differ."""
    own = getattr(model, "config", None)
    if not isinstance(own, PreTrainedConfig) or plan.model.config is None:
        return plan
    other = different_fields(own, read_config(plan.model.config))
    if not other:
        return plan
    if dist.get_rank() == 0:
        _LOG.warning(
            "model: its configuration is not the plan's in %s; it trains and is exported as it is", ", ".join(other)
        )
    content = json.loads(own.to_json_string(use_diff=True))
    content["architectures"] = [type(model).__name__]
    return replace(plan, model=replace(plan.model, config=content))


def _weights(layered: LayeredModel, model: Model, source: str | Path | Weights | None, seed: int) -> Weights:
    if isinstance(source, str | Path):
        return SavedWeights(layered, Path(source))
    if source is not None:
        return source
    if _has_values(model):
        return ModelWeights(layered, model)
    return InitialWeights(layered, seed)
