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

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ALIGNED_BYTES, LOSS_CHUNK_CELLS
from galvatron.families.given import has_hooks, own_forward
from galvatron.families.layer import IGNORED, CrossEntropy, Layer
from galvatron.runtime import collectives
from galvatron.runtime.compiled import compiler
from galvatron.runtime.tensor_parallel import operators
from galvatron.runtime.tensor_parallel.split import TensorGroup
from galvatron.runtime.tensor_parallel.vocabulary import Smoothing, SplitCrossEntropy, check_range, smoothed_target

__all__ = ["fuse"]


_FILLED_WORDS = 64
_WHOLE_TILES = 256
"""Rows of a product that GPUs compute in whole tiles: what is beyond a multiple of it takes the time of one more."""
_WANT_ALIGNED = frozenset({"cuda"})

_Chunk = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Of logits, labels and the number of words: the loss, and its gradient by the logits. What stands after the words in a
row of logits counts nothing, and its gradient is zero."""


def fuse(layer: Layer, tensor: TensorGroup | None, *, compiled: bool) -> None:
    """Let a head whose parts may be split already compute its loss in chunks."""
    assert layer.projection is not None
    projection, loss = layer.get_submodule(layer.projection), layer.loss
    assert isinstance(loss, SplitCrossEntropy | CrossEntropy)
    split = isinstance(loss, SplitCrossEntropy)
    own = None if split else "a hook" if has_hooks(projection) else own_forward(projection)
    if own is not None:
        raise InvalidInput(
            f"layer {layer.kind!r}: {layer.projection} has {own}, which would not run where projection and loss are "
            "fused; remove it, or plan without that (fused_loss=False)"
        )
    count = loss.count if isinstance(loss, SplitCrossEntropy) else len(projection.get_parameter("weight"))
    deferred = _Deferred(projection, tensor if split else None)
    layer.replace_module(layer.projection, deferred)
    smoothing = loss.smoothing.share if isinstance(loss, SplitCrossEntropy) else loss.smoothing
    chunk: _Chunk = partial(_whole, smoothing=smoothing)
    if isinstance(loss, SplitCrossEntropy):
        chunk = partial(_split, words=loss.words, group=loss.group, smoothing=loss.smoothing)
    elif compiled:
        chunk = partial(compiler().function(_compiled), smoothing=smoothing)
    layer.replace_module("loss", _ChunkedLoss(deferred, chunk, count))


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

    def __init__(self, projection: _Deferred, chunk: _Chunk, count: int) -> None:
        """``count``: words of the vocabulary."""
        super().__init__()
        self._count = count
        self._projection = (projection,)  # no module of this one
        self._chunk = chunk

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        check_range(labels, self._count, "a label", ignored=IGNORED)
        (projection,) = self._projection
        assert projection.used is not None
        (weight, bias), projection.used = projection.used, None
        hidden = hidden.to(weight.dtype)  # the model may widen its logits
        loss: Tensor = _FusedCrossEntropy.apply(hidden.flatten(0, -2), weight, bias, labels.flatten(), self._chunk)
        return loss


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: _Chunk) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        words, given = len(weight), weight.dtype
        weight, bias = _filled(weight), None if bias is None else _filled(bias)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        by_hidden = torch.empty_like(hidden) if wanted[0] else None
        by_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None
        by_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and wanted[2] else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        rows = _rows(words)
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            inputs = hidden[part]
            losses, by_logits = chunk(functional.linear(inputs, weight, bias), labels[part], words)
            total += losses
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[part])
            if by_weight is not None:
                _add_product(by_weight, by_logits.t(), inputs)
            if by_bias is not None:
                by_bias += by_logits.sum(0, dtype=wide)
            del by_logits  # before the next chunk's logits are made
        own = (None if full is None else full[:words] for full in (by_weight, by_bias))
        ctx.save_for_backward(*(None if full is None else full.to(given) for full in (by_hidden, *own)))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if own is None else own.mul_(gradient) for own in ctx.saved_tensors)
        return *found, None, None


def _rows(words: int) -> int:
    """Tokens of a chunk."""
    most = max(1, LOSS_CHUNK_CELLS // max(1, words))
    return most - most % _WHOLE_TILES if most > _WHOLE_TILES else most


def _filled(rows: Tensor) -> Tensor:
    """The weight or bias of a vocabulary, with rows of zeros after its words where products would be slow without: GPUs
    want the rows of matrices, here of logits, to begin at aligned addresses. With GPT-2's 50,257 words all three
    products take a sixth of the time so."""
    aligned = len(rows) * rows.element_size() % ALIGNED_BYTES == 0
    if aligned or rows.device.type not in _WANT_ALIGNED:
        return rows
    return functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, -len(rows) % _FILLED_WORDS))


def _whole(logits: Tensor, labels: Tensor, words: int, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The loss of some tokens, and its gradient by their logits, whose memory it uses."""
    wide = _wide(logits, words)
    counted = (labels != IGNORED).unsqueeze(-1)
    local = labels.unsqueeze(-1).clamp(min=0)
    norm = torch.logsumexp(wide, -1, keepdim=True)
    losses = ((norm - _target(wide, wide.gather(-1, local), smoothing)) * counted).sum()
    shares = wide.sub_(norm).exp_()
    if smoothing:
        shares -= smoothing / words
    shares.mul_(counted)
    shares.scatter_add_(-1, local, counted.to(shares.dtype) * (smoothing - 1))
    return losses, _in_place_of(logits, shares)


def _wide(logits: Tensor, words: int) -> Tensor:
    own = logits[:, :words]
    return own if own.dtype == torch.float64 else own.float()


def _in_place_of(logits: Tensor, gradient: Tensor) -> Tensor:
    """The gradient by all of the logits, in their memory."""
    words = gradient.shape[-1]
    if gradient.data_ptr() != logits.data_ptr():
        logits[:, :words] = gradient
    logits[:, words:] = 0
    return logits


def _target(wide: Tensor, own: Tensor, smoothing: float) -> Tensor:
    """What a target takes of its logits: of its own word's, and where labels are smoothed of all."""
    return (1 - smoothing) * own + smoothing * wide.mean(-1, keepdim=True) if smoothing else own


def _compiled(logits: Tensor, labels: Tensor, words: int, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """The same as a compiler likes it: nothing in place, and rows in their whole length, so that it reads them in
    aligned pieces."""
    place = torch.arange(logits.shape[-1], device=logits.device)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if words < logits.shape[-1]:
        wide = torch.where(place < words, wide, -torch.inf)
    counted = (labels != IGNORED).unsqueeze(-1)
    norm = torch.logsumexp(wide, -1, keepdim=True)
    own = wide.gather(-1, labels.unsqueeze(-1).clamp(min=0))
    losses = ((norm - _target(wide[:, :words], own, smoothing)) * counted).sum()
    target = (place == labels.unsqueeze(-1)).to(wide.dtype)
    if smoothing:
        target = torch.where(place < words, target * (1 - smoothing) + smoothing / words, 0)
    return losses, (((wide - norm).exp() - target) * counted).to(logits.dtype)


def _split(
    logits: Tensor, labels: Tensor, count: int, words: range, group: ProcessGroup, smoothing: Smoothing
) -> tuple[Tensor, Tensor]:
    """The same of logits that are split by vocabulary; a rank may have none."""
    wide = _wide(logits, count)
    counted = labels != IGNORED
    mine = counted & (labels >= words.start) & (labels < words.stop)
    local = torch.where(mine, labels - words.start, 0).unsqueeze(-1)
    highest = wide.amax(-1) if count else wide.new_full(labels.shape, -torch.inf)
    highest = collectives.maximum(highest, group)
    shifted = wide.sub_(highest.unsqueeze(-1))
    target = shifted.gather(-1, local).squeeze(-1) * mine if count else torch.zeros_like(highest)
    target = smoothed_target(shifted, target, smoothing)
    shares = shifted.exp_()
    sums = collectives.all_reduce(torch.stack([shares.sum(-1), target]), group)
    losses = ((sums[0].log() - sums[1]) * counted).sum()
    shares.mul_((counted / sums[0]).unsqueeze(-1))
    if smoothing.share:
        shares -= smoothing.each * counted.to(shares.dtype).unsqueeze(-1)
    if count:
        shares.scatter_add_(-1, local, mine.to(shares.dtype).unsqueeze(-1) * (smoothing.share - 1))
    return losses, _in_place_of(logits, shares)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of narrow matrices to a wide one, without rounding it before where the device can."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
