"""The loss without its logits: projection to the vocabulary and cross-entropy in chunks of tokens.

Gradients are computed in the forward pass, chunk by chunk, so that logits of one chunk at a time exist and nothing is
computed twice. Kept for backward are the gradients of the hidden states and of the weight. Works on a vocabulary that
tensor parallelism splits, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from galvatron.core.spec import LOSS_CHUNK_CELLS
from galvatron.families.layer import IGNORED, CrossEntropy, Layer
from galvatron.runtime import collectives
from galvatron.runtime.compiled import compiler
from galvatron.runtime.tensor_parallel import operators
from galvatron.runtime.tensor_parallel.split import TensorGroup
from galvatron.runtime.tensor_parallel.vocabulary import Smoothing, SplitCrossEntropy, smoothed_target

__all__ = ["fuse"]


_Chunk = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def fuse(layer: Layer, tensor: TensorGroup | None, *, compiled: bool) -> None:
    """Let a head whose parts may be split already compute its loss in chunks."""
    assert layer.projection is not None
    projection, loss = layer.get_submodule(layer.projection), layer.loss
    assert isinstance(loss, SplitCrossEntropy | CrossEntropy)
    split = isinstance(loss, SplitCrossEntropy)
    deferred = _Deferred(projection, tensor if split else None)
    layer.replace_module(layer.projection, deferred)
    smoothing = loss.smoothing.share if isinstance(loss, SplitCrossEntropy) else loss.smoothing
    chunk: _Chunk = partial(_whole, smoothing=smoothing)
    if isinstance(loss, SplitCrossEntropy):
        chunk = partial(_split, words=loss.words, group=loss.group, smoothing=loss.smoothing)
    elif compiled:
        chunk = partial(compiler().function(_compiled), smoothing=smoothing)
    layer.replace_module("loss", _ChunkedLoss(deferred, chunk))


class _Deferred(nn.Module):
    """In the place of the projection: hands on what it was to project, and its weight as it is at that time."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, projection: nn.Module, tensor: TensorGroup | None) -> None:
        super().__init__()
        weight, bias = projection.weight, projection.bias
        assert isinstance(weight, nn.Parameter)
        assert bias is None or isinstance(bias, nn.Parameter)
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self._tensor = tensor
        self.used: tuple[Tensor, Tensor | None] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.used = self.weight, self.bias
        if self._tensor is None:
            return hidden
        enter = operators.gather_to_region if self._tensor.sequence else operators.copy_to_region
        return enter(hidden, self._tensor.group)


class _ChunkedLoss(nn.Module):
    """The sum of negative log-probabilities; ignored targets add nothing."""

    def __init__(self, projection: _Deferred, chunk: _Chunk) -> None:
        super().__init__()
        self._projection = (projection,)  # no module of this one
        self._chunk = chunk

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        (projection,) = self._projection
        assert projection.used is not None
        (weight, bias), projection.used = projection.used, None
        loss: Tensor = _FusedCrossEntropy.apply(hidden.flatten(0, -2), weight, bias, labels.flatten(), self._chunk)
        return loss


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: _Chunk) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        by_hidden = torch.empty_like(hidden) if wanted[0] else None
        by_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None
        by_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and wanted[2] else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        rows = max(1, LOSS_CHUNK_CELLS // max(1, len(weight)))
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            inputs = hidden[part]
            losses, by_logits = chunk(functional.linear(inputs, weight, bias), labels[part])
            total += losses
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[part])
            if by_weight is not None:
                _add_product(by_weight, by_logits.t(), inputs)
            if by_bias is not None:
                by_bias += by_logits.sum(0, dtype=wide)
            del by_logits  # before the next chunk's logits are made
        found = (by_hidden, by_weight, by_bias)
        ctx.save_for_backward(*(None if own is None else own.to(weight.dtype) for own in found))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if own is None else own.mul_(gradient) for own in ctx.saved_tensors)
        return *found, None, None


def _whole(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The loss of some tokens, and its gradient by their logits, whose memory it uses."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    counted = (labels != IGNORED).unsqueeze(-1)
    local = labels.unsqueeze(-1).clamp(min=0)
    norm = torch.logsumexp(wide, -1, keepdim=True)
    losses = ((norm - _target(wide, wide.gather(-1, local), smoothing)) * counted).sum()
    shares = wide.sub_(norm).exp_()
    if smoothing:
        shares -= smoothing / logits.shape[-1]
    shares.mul_(counted)
    shares.scatter_add_(-1, local, counted.to(shares.dtype) * (smoothing - 1))
    return losses, shares.to(logits.dtype)


def _target(wide: Tensor, own: Tensor, smoothing: float) -> Tensor:
    """What a target takes of its logits: of its own word's, and where labels are smoothed of all."""
    return (1 - smoothing) * own + smoothing * wide.mean(-1, keepdim=True) if smoothing else own


def _compiled(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The same as a compiler likes it: nothing in place, one pass over the words."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    counted = (labels != IGNORED).unsqueeze(-1)
    norm = torch.logsumexp(wide, -1, keepdim=True)
    own = wide.gather(-1, labels.unsqueeze(-1).clamp(min=0))
    losses = ((norm - _target(wide, own, smoothing)) * counted).sum()
    target = (torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)).to(wide.dtype)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / logits.shape[-1]
    return losses, (((wide - norm).exp() - target) * counted).to(logits.dtype)


def _split(
    logits: Tensor, labels: Tensor, words: range, group: ProcessGroup, smoothing: Smoothing
) -> tuple[Tensor, Tensor]:
    """The same of logits that are split by vocabulary; a rank may have none."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    counted = labels != IGNORED
    mine = counted & (labels >= words.start) & (labels < words.stop)
    local = torch.where(mine, labels - words.start, 0).unsqueeze(-1)
    highest = wide.amax(-1) if len(words) else wide.new_full(labels.shape, -torch.inf)
    highest = collectives.maximum(highest, group)
    shifted = wide.sub_(highest.unsqueeze(-1))
    target = shifted.gather(-1, local).squeeze(-1) * mine if len(words) else torch.zeros_like(highest)
    target = smoothed_target(shifted, target, smoothing)
    shares = shifted.exp_()
    sums = collectives.all_reduce(torch.stack([shares.sum(-1), target]), group)
    losses = ((sums[0].log() - sums[1]) * counted).sum()
    shares.mul_((counted / sums[0]).unsqueeze(-1))
    if smoothing.share:
        shares -= smoothing.each * counted.to(shares.dtype).unsqueeze(-1)
    if len(words):
        shares.scatter_add_(-1, local, mine.to(shares.dtype).unsqueeze(-1) * (smoothing.share - 1))
    return losses, shares.to(logits.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of narrow matrices to a wide one, without rounding it before where the device can."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
