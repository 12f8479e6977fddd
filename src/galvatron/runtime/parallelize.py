"""From a model and a plan to one rank's share of it: the runtime's entry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Precision
from galvatron.families.build import build_meta, without_weights
from galvatron.families.generic.adapter import Generic, Loss
from galvatron.families.layer import Batch, CutModel
from galvatron.families.registry import cut as cut_model
from galvatron.families.saved import SavedWeights
from galvatron.families.weights import InitialWeights, ModelWeights, Weights
from galvatron.planner.plan.plan import Plan
from galvatron.processes.failures import report_failures
from galvatron.processes.world import cap_memory, join, own_device
from galvatron.runtime.assembly import Settings
from galvatron.runtime.build import build
from galvatron.runtime.checks import check_model, check_schedule, check_world
from galvatron.runtime.model import ParallelModel
from galvatron.runtime.replicas import check_sources
from galvatron.runtime.verify import verify

__all__ = ["parallelize"]

Model = nn.Module | PreTrainedConfig | Mapping[str, Any] | None


def parallelize(
    model: Model,
    plan: Plan,
    *,
    weights: str | Path | Weights | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    example: Batch | None = None,
    loss: Loss | None = None,
    check: bool | None = None,
) -> ParallelModel:
    """This rank's share of a model under a plan. Call it on every rank, as under ``torchrun``.

    ``model``: a stock Hugging Face model (its weights are used, unless it is on the meta device), a configuration, or
    None for the one the plan was made for. ``weights``: a folder of safetensors to start from, or another source;
    without it, and without weights in ``model``, they are initialised from ``seed``, to the same values under any plan.
    ``dtype``: compute in this instead of the plan's precision. ``example`` and ``loss`` are for models of unknown
    family (see :func:`galvatron.families.registry.cut`). ``check``: first compare loss and gradients of a tiny copy
    under the plan with the stock model's own (see :mod:`galvatron.runtime.verify`), which takes seconds; None: only for
    models of unknown family. Raises :class:`galvatron.InvalidInput` before anything is allocated if model, plan
    and number of processes do not go together, and :class:`galvatron.Unequal` if that comparison fails.
    """
    join()
    report_failures()
    check_world(plan, dist.get_world_size())
    check_schedule(plan)
    stock = _stock(model, plan)
    cut = cut_model(stock, example, loss)
    check_model(plan, cut)
    source = _weights(cut, model, weights, seed)
    where = torch.device(device) if device is not None else own_device()
    check_sources(source, where)
    if isinstance(cut, Generic) if check is None else check:
        given = model if isinstance(model, nn.Module) else stock
        verify(given, plan, device=where, example=example, loss=loss)
    cap_memory(where, plan.memory_budget_bytes - plan.cluster.facts.reserved_bytes)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    narrow = dtype or (torch.bfloat16 if plan.model.training.precision is Precision.BF16 else torch.float32)
    settings = Settings(device=where, dtype=narrow, master_dtype=wide, seed=seed)
    return build(plan, cut, settings, source)


def _stock(model: Model, plan: Plan) -> nn.Module:
    if isinstance(model, nn.Module) and not any(buffer.is_meta for buffer in model.buffers()):
        empty: nn.Module = without_weights(model)  # so that nothing of the caller's model is kept alive
        return empty
    config: Any = plan.model.config if model is None else getattr(model, "config", model)
    if config is None:
        raise InvalidInput(
            f"plan: model {plan.model.name!r} was described by figures alone (model.config is null), so it cannot be "
            "built; give parallelize the model or its configuration"
        )
    return build_meta(config, plan.model.training, as_named=plan.model.family == "generic")


def _weights(cut: CutModel, model: Model, source: str | Path | Weights | None, seed: int) -> Weights:
    if isinstance(source, str | Path):
        return SavedWeights(cut, Path(source))
    if source is not None:
        return source
    if isinstance(model, nn.Module) and not any(parameter.is_meta for parameter in model.parameters()):
        return ModelWeights(cut, model)
    return InitialWeights(cut, seed)
