"""Kinds of blocks: equal blocks are one kind of layer for the planner. Models mix dense and expert blocks, local and
global attention, attention and state spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from galvatron.families.lora import adapter_of, is_adapter, plain_name, without_adapter

__all__ = ["block_kinds"]

_BLOCK = "block"


def block_kinds(model: nn.Module, blocks: Sequence[nn.Module], stack: str = "") -> list[str]:
    """The name of each block's kind: ``block`` where all are equal, else after what the configuration calls its type of
    layer, and after its experts. ``stack``: the name of their list, if the model has several (``encoder``)."""
    types = _layer_types(model, len(blocks), stack)
    outlines = [_outline(block) for block in blocks]
    keys = list(zip(types, outlines, strict=True))
    distinct = list(dict.fromkeys(keys))
    if len(distinct) == 1:
        return [stack or _BLOCK] * len(blocks)
    names: dict[Any, str] = {}
    for key in distinct:
        type_, outline = key
        base = (f"{stack}-{type_}" if stack and type_ else type_) or stack or _BLOCK
        if len({other for other in distinct if other[0] == type_}) > 1:
            base += "-experts" if _has_experts(outline) else "-dense" if _mixed(distinct, type_) else ""
        taken = sum(
            name == base or (name.startswith(f"{base}-") and name[len(base) + 1 :].isdigit()) for name in names.values()
        )
        names[key] = f"{base}-{taken + 1}" if taken else base
    return [names[key] for key in keys]


def _layer_types(model: nn.Module, count: int, stack: str) -> list[str]:
    """What the configuration says of each block; empty where it says nothing."""
    config: Any = getattr(model, "config", None)
    if stack:
        config = getattr(config, stack, None) or getattr(config, f"{stack}_config", None) or config
    full = getattr(config, "fullatt_block_indexes", None)
    if isinstance(full, list | tuple):
        return ["full_attention" if block in full else "windows" for block in range(count)]
    texts = [config.get_text_config(), config] if hasattr(config, "get_text_config") else [config]
    for own in texts:
        for field in ("layer_types", "layers_block_type"):
            types = getattr(own, field, None)
            if isinstance(types, list | tuple) and len(types) == count and all(isinstance(each, str) for each in types):
                return list(types)
    return [""] * count


def _outline(block: nn.Module) -> tuple[Any, ...]:
    """What a block is made of, without low-rank adapters: the same whether it has some or not."""
    adapted = tuple(f"{name}." for name, own in block.named_modules() if adapter_of(own) is not None)
    return (
        type(block).__name__,
        tuple(
            (name, type(without_adapter(own)).__name__)
            for name, own in block.named_modules()
            if not name.startswith(adapted)
        ),
        tuple((plain_name(name), tuple(own.shape)) for name, own in block.named_parameters() if not is_adapter(name)),
    )


def _has_experts(outline: tuple[Any, ...]) -> bool:
    return any("experts" in name for name, _ in outline[1])


def _mixed(distinct: Sequence[Any], type_: str) -> bool:
    found = {_has_experts(outline) for other, outline in distinct if other == type_}
    return len(found) > 1
