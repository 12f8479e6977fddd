"""How sequences of a traced model's layers can be divided over devices, as the planner needs to know it."""

from __future__ import annotations

import logging
from typing import Any

from galvatron.core.spec import Context, Training
from galvatron.families.generic.adapter import Generic
from galvatron.families.generic.divided import SeenAttention
from galvatron.planner.space import LONG_SEQUENCE

__all__ = ["context_facts", "say_undivided"]

_LOG = logging.getLogger(__name__)
_DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attn_dropout",
    "attention_dropout_prob",
)
"""Where configurations have the dropout of attention's weights."""


def context_facts(layered: Generic, index: int, tokens: int | None, flops: int, training: Training) -> Context | None:
    """Of one layer; None: its sequences cannot be divided. ``flops``: of its fused attention, zero if it has none."""
    if tokens is None or layered.why_undivided(index) is not None:
        return None
    seen = layered.attention(layered.layers[index])
    if not isinstance(seen, SeenAttention):
        return Context(length=tokens)
    element = training.precision.bytes
    maps = 4 * tokens * tokens * seen.heads * seen.width
    return Context(
        length=tokens,
        heads=seen.heads,
        key_value_heads=seen.key_value_heads,
        causal=seen.causal,
        ring=not _drops(getattr(layered.model, "config", None), training),
        attention_flops=flops or maps,
        query_bytes=tokens * seen.heads * seen.width * element,
        key_value_bytes=2 * tokens * seen.key_value_heads * seen.width * element,
    )


def say_undivided(layered: Generic, tokens: int | None) -> None:
    """Warn of layers whose sequences cannot be divided, where these are long."""
    if (tokens or 0) < LONG_SEQUENCE:
        return
    name = type(layered.model).__name__
    for reason in dict.fromkeys(layered.why_undivided(index) for index in range(len(layered.layers))):
        if reason is not None:
            _LOG.warning("%s: long samples are not divided over devices in all its layers, because %s", name, reason)


def _drops(config: Any, training: Training) -> bool:
    """Whether attention has dropout."""
    return training.dropout is not False and any(getattr(config, name, None) for name in _DROPOUTS)
