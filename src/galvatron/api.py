"""The few names for use from Python: what the command line does, with values instead of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Cluster, ModelSpec
from galvatron.planner.plan.advice import make_plan
from galvatron.planner.plan.options import Setup, checked_setup
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.setup import request_for, with_adapters

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

__all__ = ["plan"]


def plan(
    model: str | Path | ModelSpec | nn.Module | PreTrainedConfig,
    cluster: str | Path | Cluster = "auto",
    **setup: Unpack[Setup],
) -> Plan:
    """The provably best plan for a model on a cluster (preset, file or facts; "auto": this machine, measured).

    ``model``: a preset's name, a file or folder, a Hugging Face model or configuration of any architecture that can be
    divided into layers, or facts: for a model of your own those that :func:`galvatron.describe` traces. Options are
    those of the command line:
    ``memory`` is the budget of each device ("8GB", "8GiB", bytes; default: all it has), ``batch`` a fixed global batch
    in samples, ``batch_tokens`` one in tokens ("4M"), ``recompute=False`` turns an extension off, and so on; see
    :class:`galvatron.planner.plan.options.Setup`. Parameters of a model in memory whose ``requires_grad`` is False
    are planned as frozen. Raises :class:`galvatron.Infeasible` with advice when nothing fits.
    """
    setup = checked_setup(setup)
    if model is None or model == "" or isinstance(model, int | float):
        raise InvalidInput(f"model: {model!r} given; expected a preset's name ('galvatron models'), a file or a model")
    if hasattr(model, "named_parameters"):
        model = _tuned_as(cast("nn.Module", model), setup)
    source = model if isinstance(model, str | Path | ModelSpec) else _configuration(model)
    if cluster == "auto":
        from galvatron.measure.auto import request_here

        return make_plan(request_here(source, setup, devices=setup.pop("devices", None)))
    from galvatron.measure.models import load_any_model

    return make_plan(request_for(source, cluster, setup, load_any_model))


def _tuned_as(model: nn.Module, setup: Setup) -> nn.Module:
    """The stock model in memory; the setup then says what of it is frozen, and which adapters it has."""
    from galvatron.families.altered import check_known
    from galvatron.families.given import as_stock
    from galvatron.families.lora import lora_of, without_peft
    from galvatron.families.tuning import frozen_parts

    stock: nn.Module = without_peft(as_stock(model))
    check_known(stock)
    lora = lora_of(stock)
    if lora is not None:
        setup.update(with_adapters(setup, lora))
        return stock
    said = [setup.get("freeze") or "", *frozen_parts(stock)]
    setup["freeze"] = ",".join(each for each in said if each) or None
    return stock


def _configuration(model: Any) -> dict[str, Any]:
    """What a ``config.json`` of the model would say."""
    config = getattr(model, "config", model)
    if not hasattr(config, "to_json_string"):
        raise InvalidInput(
            f"model: a {type(model).__name__} has no Hugging Face configuration; measure it with "
            "galvatron.describe(model, batch) and plan for what that returns"
        )
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    if config is not model and type(model).__module__.startswith("transformers."):
        content["architectures"] = [type(model).__name__]
    return content
