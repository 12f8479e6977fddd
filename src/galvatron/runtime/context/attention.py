"""Attention over divided sequences, as transformers calls it: Ulysses around a ring, or one of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from galvatron.core.errors import InvalidInput
from galvatron.families.context import CONTEXT_ATTENTION, ContextMask, unknown_to_context
from galvatron.runtime.context.ring import ring_attention
from galvatron.runtime.context.ulysses import heads_to_tokens, tokens_to_heads
from galvatron.runtime.tensor_parallel import operators

__all__ = ["attend_in_context", "context_attention"]


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attention of this rank's tokens to all of the sequence; tensors are (rows, heads, tokens, width)."""
    dropout: float = asked.get("dropout") or 0.0
    scaling: float | None = asked.get("scaling")
    is_causal: bool | None = asked.get("is_causal")
    name = type(module).__name__
    if not isinstance(attention_mask, ContextMask):
        raise InvalidInput(
            f"{name}: is given a mask of its model's own, so its sequences cannot be divided over ranks; plan without "
            "context parallelism (--no-context-parallel)"
        )
    unknown = unknown_to_context(asked)
    if unknown is not None:
        raise InvalidInput(
            f"{name}: its attention has {unknown}, which is not known where sequences are divided over ranks; plan "
            "without context parallelism (--no-context-parallel)"
        )
    mask = attention_mask
    if dropout and mask.ring:
        raise InvalidInput(
            f"{name}: drops out {dropout} of its attention's weights, which a ring cannot; take Ulysses alone, set the "
            "rate to 0 in the model's configuration, or plan without context parallelism (--no-context-parallel)"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask.ulysses:
        query, key, value = (heads_to_tokens(own, mask.ulysses) for own in (query, key, value))
    if mask.ring or (mask.runs is not None and not dropout):
        attended = ring_attention((query, key, value), mask.runs, mask.ring, causal=causal, scale=scale)
    else:
        allowed = None if mask.runs is None else _allowed(mask.runs, query.detach(), causal)
        attended = functional.scaled_dot_product_attention(
            query, key, value, allowed, dropout, causal and allowed is None,
            scale=scale, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    if mask.ulysses:
        attended = tokens_to_heads(attended, mask.ulysses)
    return attended.transpose(1, 2).contiguous(), None


def attend_in_context(layer: nn.Module) -> None:
    """Let the attention of a layer, which has a copy of its configuration, be that over divided sequences."""
    for module in layer.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = CONTEXT_ATTENTION


# One node of a graph: where runs begin and end is no matter for a compiler, which would compile for each batch anew.
@operators.node("allowed_in_context", "(Tensor runs, Tensor query, bool causal) -> Tensor")
def _allowed(runs: Tensor, query: Tensor, causal: bool) -> Tensor:
    """What each token of a whole sequence may attend to (rows, 1, tokens, tokens)."""
    rows, _, length, _ = query.shape
    allowed = query.new_zeros((rows, 1, length, length), dtype=torch.bool)
    for row, first, last, begin, end in runs.tolist():
        allowed[row, :, first:last, begin:end] = True
    return allowed.tril_() if causal else allowed


@_allowed.register_fake
def _(runs: Tensor, query: Tensor, causal: bool) -> Tensor:
    rows, _, length, _ = query.shape
    return query.new_empty((rows, 1, length, length), dtype=torch.bool)


AttentionInterface.register(CONTEXT_ATTENTION, context_attention)
