"""Low-rank adapters that ``fuzz_training.py --adapters`` draws: peft's own, with options that people give it."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import schedule_named
from galvatron.families import load_cluster
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.options import Setup
from galvatron.planner.plan.planner import Request

__all__ = ["adapted", "adapted_plan", "draw_adapters", "plain_name", "stock_of"]

_HEADS = ("lm_head", "classifier", "score", "cls")


def draw_adapters(dice: random.Random, model: nn.Module) -> str:
    """Options of peft's ``LoraConfig``, and what is done with the model afterwards (``then``), as JSON."""
    linear = sorted(
        {name.rpartition(".")[2] for name, own in model.named_modules() if isinstance(own, nn.Linear | Conv1D)}
    )
    inner = [name for name in linear if name not in _HEADS and not name.isdecimal()] or linear
    rank = dice.choice([1, 2, 3, 4, 5])
    options: dict[str, Any] = {
        "r": rank,
        "lora_alpha": dice.choice([1, rank, 2 * rank]),
        "target_modules": "all-linear",
    }
    if dice.random() < 0.6:
        options["target_modules"] = sorted(dice.sample(inner, dice.randint(1, min(3, len(inner)))))
    rare: list[tuple[float, str, Any]] = [
        (0.2, "use_rslora", True),
        (0.05, "use_dora", True),
        (0.1, "bias", "all"),
        (0.1, "bias", "lora_only"),
        (0.15, "layers_to_transform", [0] if isinstance(options["target_modules"], list) else None),
        (0.1, "rank_pattern", {inner[0]: rank + 1}),
        (0.3, "modules_to_save", [name for name in linear if name in _HEADS][:1] or ["norm"]),
        (0.15, "then", "unfreeze norms"),
        (0.05, "then", "merge"),
        (0.05, "then", "disable"),
        (0.05, "then", "second"),
        (0.1, "then", "unfreeze some"),
        (0.05, "then", "freeze A"),
        (0.05, "then", "freeze all"),
    ]
    options.update({name: value for chance, name, value in rare if dice.random() < chance / 2 and value})
    return json.dumps(options)


def adapted(model: nn.Module, options: str, seed: int) -> Any:
    """The stock model as peft's, with adapters that are not zero."""
    from peft import LoraConfig, get_peft_model

    given = json.loads(options)
    then = given.pop("then", "")
    conv = any(isinstance(own, Conv1D) for own in model.modules())
    config = LoraConfig(**given, fan_in_fan_out=conv)
    try:
        with warnings.catch_warnings():  # of tied weights, which are among the cases
            warnings.simplefilter("ignore")
            made: Any = get_peft_model(model, config)
        if then == "second":
            made.add_adapter("other", LoraConfig(**given, fan_in_fan_out=conv))
    except ValueError as error:
        raise InvalidInput(f"peft: {error}") from None
    if then == "second":
        made.set_adapter("other")
    generator = torch.Generator().manual_seed(seed)
    dice = random.Random(seed)
    with torch.no_grad():
        for name, own in made.named_parameters():
            if "lora_" in name:
                own.copy_(torch.randn(own.shape, generator=generator) * 0.1)
                own.requires_grad_(then != "freeze all" and not (then == "freeze A" and "lora_A" in name))
            elif then == "unfreeze norms":
                own.requires_grad_("norm" in name.lower() or own.requires_grad)
            elif then == "unfreeze some":
                own.requires_grad_(dice.random() < 0.2 or own.requires_grad)
    if then == "merge":
        made.merge_adapter()
    elif then == "disable":
        made.base_model.disable_adapter_layers()
    return made


def stock_of(model: nn.Module) -> nn.Module:
    """The model inside peft's, with its adapters; any other model itself."""
    given: Any = model
    stock: nn.Module = given.get_base_model() if hasattr(model, "peft_config") else model
    return stock


def plain_name(name: str) -> str:
    """The stock model's name of a parameter of a module that peft trains in full."""
    return name.replace(".modules_to_save.default.", ".")


def adapted_plan(model: nn.Module, case: Any) -> galvatron.Plan:
    """For what ``galvatron.plan(model)`` says of the model, with the strategies that were drawn."""
    cluster, options = f"rtx4090:{case.devices}", Setup(batch=8 * case.devices, precision="fp32", compile=case.compiled)
    options["attention"], options["dropout"] = "fused" if case.attention == "sdpa" else "eager", False
    if getattr(stock_of(model), "main_input_name", "input_ids") == "input_ids":
        options["sequence_length"] = case.length
    spec = galvatron.plan(model, cluster, **options).model.spec()
    schedule = schedule_named(case.schedule)
    request = Request(model=spec, cluster=load_cluster(cluster), batch=case.batch, schedule=schedule)
    return priced(request, case.stages, micro_batches=case.micro_batches)
