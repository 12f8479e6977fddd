"""Tensor-parallel rules of a stock model from its own plan: transformers says for most architectures how each weight
is split (``model.tp_plan``, such as ``"model.layers.*.self_attn.q_proj": "colwise"``).

A style that we cannot apply is named, and then nothing is split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from galvatron.families.layer import Layer
from galvatron.families.lora import without_adapter
from galvatron.families.rules import (
    Columns,
    Experts,
    PartialGradients,
    Rows,
    Rule,
    SharedKey,
    Summed,
    Table,
    Vocabulary,
)

__all__ = ["NoTensorParallelism", "block_rules", "divides", "plan_of", "rules_within", "starred"]


class NoTensorParallelism(Exception):
    """Why a layer cannot be split."""


def plan_of(model: nn.Module) -> dict[str, str]:
    """The stock model's plan: names with ``*`` for numbers, each with its style. Empty: it has none."""
    found = getattr(model, "tp_plan", None)
    return dict(found) if isinstance(found, Mapping) else {}


def block_rules(model: nn.Module, name: str) -> tuple[Rule, ...]:
    """How the plan splits the block of this name, with paths relative to it; empty: it says nothing of it.

    Raises :class:`NoTensorParallelism` if it says something that we cannot do.
    """
    plan, block = plan_of(model), model.get_submodule(name)
    config: Any = getattr(model, "config", None)
    rules: list[Rule] = []
    for path, module in block.named_modules():
        style = plan.get(starred(f"{name}.{path}")) if path else None
        if style is not None:
            rules += _of_module(path, module, style, config)
        for own, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{own}".lstrip(".")
            style = plan.get(starred(f"{name}.{full}"))
            if style is not None:
                rules += _of_parameter(full, parameter, style)
    silent = [path for path, _ in block.named_modules() if starred(f"{name}.{path}") not in plan]
    return *rules, *_norms_of_heads(block, silent, rules, config)


def _norms_of_heads(block: nn.Module, silent: list[str], rules: list[Rule], config: Any) -> list[Rule]:
    """Norms of single heads that the plan forgets (Qwen3-VL-MoE's): a rank has some of the heads, and so a part of the
    gradient."""
    columns = {rule.path.rpartition(".")[0] for rule in rules if isinstance(rule, Columns) and not rule.gathered}
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    width = _of_all_layers(text, "head_dim")
    return [
        PartialGradients(path)
        for path in silent
        if path.rpartition(".")[0] in columns
        and "norm" in path.rpartition(".")[2]
        and {tuple(own.shape) for own in block.get_submodule(path).parameters()} == {(width,)}
    ]


def _of_all_layers(config: Any, field: str, differing: int | None = None) -> Any:
    """A figure of a configuration, None if it has none; ``differing`` where layers differ in it."""
    try:
        return getattr(config, field, None)
    except RuntimeError:  # transformers' answer there
        return differing


def rules_within(attribute: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules of a block with the paths that they have in a layer that owns it under this attribute."""
    return tuple(replace(rule, path=f"{attribute}.{rule.path}") for rule in rules)


def starred(name: str) -> str:
    """A name as plans have it, with ``*`` for numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _of_module(path: str, module: nn.Module, style: str, config: Any) -> list[Rule]:
    match style:
        case "colwise" | "packed_colwise" | "colwise_gather_output" | "colwise_rep":
            _require_linear(path, module, style)
            gathered = style in ("colwise_gather_output", "colwise_rep")
            return [Columns(path, parts=2 if style == "packed_colwise" else 1, gathered=gathered)]
        case "rowwise" | "rowwise_split_input" | "rowwise_rep":
            _require_linear(path, module, style)
            return [Rows(path, takes_whole=style != "rowwise")]
        case "embedding_rowwise" if isinstance(module, nn.Embedding):
            return [Vocabulary(path)]
        case "replicated_with_grad_allreduce":
            return [PartialGradients(path)]
        case "moe_tp_experts":
            return [Experts(path)]
        case "all_reduce":
            return [Summed(path)]
        case "mla_kv_a_proj":
            width = getattr(config.get_text_config(), "qk_rope_head_dim", None)
            if isinstance(width, int):
                return [SharedKey(path, width)]
        case "replicate":
            return []
    raise NoTensorParallelism(f"its plan in transformers splits {path} as {style!r}, which cannot be done here")


def _of_parameter(path: str, parameter: nn.Parameter, style: str) -> list[Rule]:
    """A parameter that a module owns itself: tables of experts (expert, outputs, inputs), sinks of attention heads."""
    last = parameter.ndim - 1
    outputs = max(last - 1, 0)
    match style:
        case "colwise":
            return [Table(path, outputs)]
        case "packed_colwise":
            return [Table(path, outputs, parts=2)]
        case "rowwise" if last:
            return [Table(path, last)]
        case "packed_rowwise" if last:
            return [Table(path, last, parts=2)]
        case "replicate":
            return []
    raise NoTensorParallelism(f"its plan in transformers splits {path} as {style!r}, which cannot be done here")


def _require_linear(path: str, module: nn.Module, style: str) -> None:
    if type(without_adapter(module)) is not nn.Linear:
        raise NoTensorParallelism(
            f"its plan in transformers splits {path} as {style!r}, but it is a {type(module).__name__} and no linear "
            "projection"
        )


def divides(layer: Layer, config: Any) -> tuple[int, ...]:
    """What a degree of TP must divide: attention heads, what is gathered or of which a part is taken, and pairs."""
    found: dict[int, None] = {}
    for rule in layer.rules:
        if isinstance(rule, Columns) and rule.heads is not None:
            found[rule.heads] = None
        elif isinstance(rule, Columns) and not rule.gathered and re.search("attn|attention", rule.path):
            text = config.get_text_config()
            heads = [
                _of_all_layers(text, field, differing=1) for field in ("num_attention_heads", "num_key_value_heads")
            ]
            found |= {own: None for own in heads if isinstance(own, int)}
        elif isinstance(rule, Columns) and rule.gathered:
            found[_linear(layer, rule.path).out_features] = None
        elif isinstance(rule, Rows) and rule.takes_whole:
            found[_linear(layer, rule.path).in_features] = None
        elif isinstance(rule, Table) and rule.pairs:
            found[rule.features(layer.get_parameter(rule.path).shape[rule.dim])] = None
    if any(isinstance(rule, Rows) for rule in layer.rules):
        # Ranks with more features than others would draw more random numbers (dropout), and then others than they.
        for rule in layer.rules:
            if isinstance(rule, Columns) and not rule.gathered:
                width = _outputs(layer, rule.path) // rule.parts
                found |= {} if any(width % known == 0 for known in found) else {width: None}
    return tuple(found)


def _outputs(layer: Layer, path: str) -> int:
    module: Any = without_adapter(layer.get_submodule(path))
    width: int = module.out_features if isinstance(module, nn.Linear) else module.nf
    return width


def _linear(layer: Layer, path: str) -> nn.Linear:
    module = without_adapter(layer.get_submodule(path))
    assert isinstance(module, nn.Linear)
    return module
