"""A vocabulary split over ranks: embedding and cross-entropy, without any rank ever holding all logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import IGNORED
from galvatron.runtime import collectives
from galvatron.runtime.tensor_parallel import operators

__all__ = ["Smoothing", "SplitCrossEntropy", "SplitEmbedding", "check_range", "smoothed_target", "split_lookup"]


def check_range(numbers: Tensor, count: int, what: str, *, ignored: int | None = None) -> None:
    """Refuse numbers of words that there are not, as a whole table would; a GPU finds out by itself, later."""
    if isinstance(numbers, FakeTensor):
        return
    fine = (numbers >= 0) & (numbers < count)
    if ignored is not None:
        fine |= numbers == ignored
    if numbers.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(fine.all(), f"batch: {what} out of range: not 0 to {count - 1}")
    elif not fine.all():
        wrong = int(numbers[~fine].flatten()[0])
        also = "" if ignored is None else f", or {ignored} for what does not count"
        raise InvalidInput(f"batch: {what} has {wrong}; expected 0 to {count - 1}{also}")


class SplitEmbedding(nn.Module):
    """Each rank looks up the words it holds; the vectors are summed."""

    def __init__(self, weight: nn.Parameter, words: range, whole: nn.Embedding, group: ProcessGroup) -> None:
        """``whole``: in whose place it is."""
        super().__init__()
        self.weight = weight
        self.words, self.group = words, group
        self._count, padding = whole.num_embeddings, whole.padding_idx
        self._padding = padding - words.start if padding is not None and padding in words else None

    def forward(self, ids: Tensor) -> Tensor:
        check_range(ids, self._count, "a token")
        mine = (ids >= self.words.start) & (ids < self.words.stop)
        if not len(self.words):  # more ranks than rows: this one has nothing to look up
            vectors = self.weight.sum() * mine.unsqueeze(-1).expand(*ids.shape, self.weight.shape[1])
        else:
            local = torch.where(mine, ids - self.words.start, 0)
            vectors = functional.embedding(local, self.weight, self._padding) * mine.unsqueeze(-1)
        return operators.reduce_from_region(vectors, self.group)


def split_lookup(module: nn.Embedding, words: range, group: ProcessGroup) -> None:
    """Let an embedding with a forward of its own, whose weight is this rank's rows already, do what
    :class:`SplitEmbedding` does: right where that forward is linear in the looked-up vectors."""
    if module.padding_idx is not None:
        module.padding_idx = module.padding_idx - words.start if module.padding_idx in words else None
    if not len(words):
        raise InvalidInput(
            f"{type(module).__name__}: has fewer rows than tensor-parallel ranks; plan with a lower degree"
        )
    count, mine = module.num_embeddings, list[Tensor]()

    def look(own: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0]
        check_range(ids, count, "a token")
        held = (ids >= words.start) & (ids < words.stop)
        mine.append(held)
        return torch.where(held, ids - words.start, 0), *args[1:]

    def add_up(own: nn.Module, args: tuple[Any, ...], vectors: Tensor) -> Tensor:
        return operators.reduce_from_region(vectors * mine.pop().unsqueeze(-1), group)

    module.register_forward_pre_hook(look)
    module.register_forward_hook(add_up)


class Smoothing(NamedTuple):
    """Of labels (:mod:`galvatron.families.smoothing`), as a rank with some of the words must know it."""

    share: float
    vocabulary: int
    """Words of all ranks."""

    @property
    def each(self) -> float:
        """What each word has of each target."""
        return self.share / self.vocabulary if self.share else 0.0


UNSMOOTHED = Smoothing(0.0, 0)


class SplitCrossEntropy(nn.Module):
    """The sum of negative log-probabilities from logits split by vocabulary."""

    def __init__(self, words: range, count: int, group: ProcessGroup, smoothing: Smoothing = UNSMOOTHED) -> None:
        """``words``: this rank's, of ``count`` in all."""
        super().__init__()
        self.words, self.count, self.group, self.smoothing = words, count, group, smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        check_range(labels, self.count, "a label", ignored=IGNORED)
        loss: Tensor = _SplitCrossEntropy.apply(
            logits.flatten(0, -2), labels.flatten(), self.words, self.group, self.smoothing
        )
        return loss


def smoothed_target(shifted: Tensor, target: Tensor, smoothing: Smoothing) -> Tensor:
    """This rank's part of what a smoothed target takes of its logits."""
    return (1 - smoothing.share) * target + smoothing.each * shifted.sum(-1) if smoothing.share else target


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, words: range, group: ProcessGroup, smoothing: Smoothing
    ) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        counted = labels != IGNORED
        mine = counted & (labels >= words.start) & (labels < words.stop)
        local = torch.where(mine, labels - words.start, 0).unsqueeze(-1)
        highest = wide.amax(-1) if len(words) else wide.new_full(labels.shape, -torch.inf)
        highest = collectives.maximum(highest, group)
        # A copy is ours to write over: maps of tokens × words are what memory goes into here.
        shifted = wide - highest.unsqueeze(-1) if wide.dtype == logits.dtype else wide.sub_(highest.unsqueeze(-1))
        target = shifted.gather(-1, local).squeeze(-1) * mine if len(words) else torch.zeros_like(highest)
        target = smoothed_target(shifted, target, smoothing)
        shares = shifted.exp_()
        sums = collectives.all_reduce(torch.stack([shares.sum(-1), target]), group)
        shares /= sums[0].unsqueeze(-1)
        ctx.dtype, ctx.smoothing = logits.dtype, smoothing
        ctx.save_for_backward(shares, local, mine, counted)
        losses: Tensor = (sums[0].log() - sums[1]) * counted
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        shares, local, mine, counted = ctx.saved_tensors
        share, each = ctx.smoothing.share, ctx.smoothing.each
        # In place: autograd refuses a second pass over what was saved and then changed.
        by_logits = (shares.sub_(each) if share else shares).mul_((counted * gradient).unsqueeze(-1))
        if by_logits.shape[-1]:
            by_logits.scatter_add_(-1, local, (mine * ((share - 1) * gradient)).to(by_logits.dtype).unsqueeze(-1))
        return by_logits.to(ctx.dtype), None, None, None, None
