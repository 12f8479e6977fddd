"""Label smoothing: each target gives a share of its weight to all words in equal parts.

As the LabelSmoother of transformers' Trainer (``label_smoothing_factor``): with log-probabilities p of all words, a
target costs -(1 - share)·p[target] - share·mean(p), in training and in evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import IGNORED, CrossEntropy, LayeredModel

__all__ = ["SmoothedCrossEntropy", "smooth_labels"]


def smooth_labels(layered: LayeredModel, share: float) -> None:
    """Let a model's loss have smoothed labels; refuse a model whose loss is another than cross-entropy."""
    if not 0 <= share < 1:
        raise InvalidInput(f"label-smoothing: {share} given; expected a share from 0 to below 1")
    if not share:
        return
    head = layered.layers[-1]
    if getattr(head, "custom", None) is not None or not isinstance(getattr(head, "loss", None), CrossEntropy):
        raise InvalidInput("label-smoothing: the loss of this model is not its own cross-entropy; leave it out")
    if getattr(head, "balance", None) is not None:
        raise InvalidInput(
            "label-smoothing: the loss of this model has a term for the balance of experts, which transformers leaves "
            "out where labels are smoothed; leave one of the two out (output_router_logits: false)"
        )
    head.replace_module("loss", SmoothedCrossEntropy(share))


class SmoothedCrossEntropy(CrossEntropy):
    """Cross-entropy with smoothed labels, which keeps no more for backward than the plain one."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss: Tensor = _Smoothed.apply(wide.flatten(0, -2), labels.flatten(), self.smoothing)  # type: ignore[no-untyped-call]
        return loss


class _Smoothed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, share: float) -> Tensor:
        chances = logits.log_softmax(-1)
        counted, local = labels != IGNORED, labels.clamp(min=0).unsqueeze(-1)
        ctx.share = share
        ctx.save_for_backward(chances, local, counted)
        losses = (1 - share) * chances.gather(-1, local).squeeze(-1) + share * chances.mean(-1)
        return -(losses * counted).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """By logits: their probabilities less the smoothed target."""
        chances, local, counted = ctx.saved_tensors
        weights = (counted * gradient).unsqueeze(-1)
        by_logits = chances.exp().sub_(ctx.share / chances.shape[-1]).mul_(weights)
        by_logits.scatter_add_(-1, local, (weights * (ctx.share - 1)).to(by_logits.dtype))
        return by_logits, None, None
