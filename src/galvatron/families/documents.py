"""Rows of several documents on GPUs: attention that skips what lies between documents, instead of masking it.

FlexAttention, through transformers: the stock model's own mask helper makes a block mask from positions that start
anew.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from galvatron.core.spec import Attention, Training
from galvatron.families.discovery import family_of

__all__ = ["attend_by_document", "why_by_mask"]

_LOG = logging.getLogger(__name__)
_FLEX = "flex_attention"
_LEAST_HEAD = 16
"""Width of a head; FlexAttention's kernels take powers of two from it on."""


def attend_by_document(stock: nn.Module, training: Training, *, keeps_some: bool = False) -> None:
    """Let a stock model that has no layers yet attend document by document; where it cannot, a mask does it.

    ``keeps_some``: recomputed layers keep some results, which are those of other kernels.
    """
    reason = "the plan keeps some results of recomputed layers" if keeps_some else why_by_mask(stock, training)
    if reason is None:
        model: Any = stock
        model.set_attn_implementation(_FLEX)
    else:
        _LOG.warning("documents in one row are kept apart by a mask, which costs time: %s", reason)


def why_by_mask(stock: nn.Module, training: Training) -> str | None:
    """Why a model cannot attend so on a GPU; None: it can."""
    config: Any = stock.config
    kind = type(stock).__name__
    if training.attention is not Attention.FUSED:
        return f"attention is {training.attention}"
    if config._attn_implementation != "sdpa":
        return f"the model was made with attention {config._attn_implementation!r}"
    if family_of(config.model_type) is None:
        return f"{kind} is of no known family, whose masks we make"
    if not getattr(stock, "_supports_flex_attn", False):
        return f"{kind} has no FlexAttention in transformers"
    if training.dropout is not False and float(getattr(config, "attention_dropout", 0)) > 0:
        return "FlexAttention has no dropout"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width < _LEAST_HEAD or width & (width - 1):
        return f"its heads are {width} wide, which is no power of two from {_LEAST_HEAD} on"
    return None
