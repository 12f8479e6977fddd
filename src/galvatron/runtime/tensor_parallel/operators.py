"""The operators of tensor parallelism with their gradients: Megatron's f and g, and those of sequence parallelism.

Each takes local tensors and the tensor-parallel group. Sequence is dim 1 of an activation (rows, tokens, features).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.core.errors import InvalidInput
from galvatron.runtime import collectives

__all__ = [
    "SequenceAllGather",
    "SequenceReduceScatter",
    "copy_to_region",
    "gather_features",
    "gather_sequence",
    "gathered",
    "reduce_from_region",
    "slice_features",
    "slice_sequence",
    "sum_sequence",
]


def copy_to_region(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """f: into the split part; the gradients that all ranks' parts give are summed."""
    entered: Tensor = _CopyToRegion.apply(tensor, group)
    return entered


def gather_features(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """All features (the last dim). Every rank then computes the same, so backward just slices."""
    whole: Tensor = _GatherFeatures.apply(tensor, group)
    return whole


def slice_features(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's features of what is whole on each; backward gathers."""
    part: Tensor = _SliceFeatures.apply(tensor, group)
    return part


def reduce_from_region(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """g: out of the split part; partial results of all ranks are summed."""
    left: Tensor = _ReduceFromRegion.apply(tensor, group)
    return left


def sum_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """g with sequence parallelism: partial results are summed, each rank keeps its part of the tokens."""
    part: Tensor = _SumSequence.apply(tensor, group)
    return part


def gather_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Out of sequence parallelism: all tokens. Every rank then computes the same, so backward just slices."""
    whole: Tensor = _GatherSequence.apply(tensor, group)
    return whole


def slice_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Into sequence parallelism: this rank's tokens; backward gathers."""
    part: Tensor = _SliceSequence.apply(tensor, group)
    return part


class SequenceAllGather:
    """All tokens of a tensor divided along the sequence, under way; no gradient."""

    def __init__(self, part: Tensor, group: ProcessGroup) -> None:
        self._shape, self._ranks = part.shape, group.size()
        self._pieces = collectives.AllGather(part, group)

    def result(self) -> Tensor:
        rows, tokens, *tail = self._shape
        pieces = self._pieces.result().view(self._ranks, rows, tokens, *tail)
        return pieces.transpose(0, 1).reshape(rows, self._ranks * tokens, *tail)


class SequenceReduceScatter:
    """This rank's tokens of the sum over the group, under way; no gradient."""

    def __init__(self, whole: Tensor, group: ProcessGroup) -> None:
        rows, tokens, *tail = whole.shape
        pieces = whole.view(rows, group.size(), tokens // group.size(), *tail).transpose(0, 1)
        joined = pieces.reshape(group.size() * rows, tokens // group.size(), *tail)
        self._part = collectives.ReduceScatter(joined, group)

    def result(self) -> Tensor:
        return self._part.result()


def gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    """All tokens of a tensor divided along the sequence; no gradient."""
    return SequenceAllGather(part, group).result()


def sliced(whole: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's tokens; no gradient."""
    if whole.shape[1] % group.size():
        raise InvalidInput(
            f"batch: sequences of {whole.shape[1]} tokens cannot be divided over {group.size()} ranks, as +sp would; "
            "pad them to a multiple"
        )
    tokens = whole.shape[1] // group.size()
    return whole.narrow(1, group.rank() * tokens, tokens).contiguous()


def _all_features(part: Tensor, group: ProcessGroup) -> Tensor:
    pieces = collectives.all_gather(part.movedim(-1, 0), group)
    return pieces.movedim(0, -1).contiguous()


def _own_features(whole: Tensor, group: ProcessGroup) -> Tensor:
    each = whole.shape[-1] // group.size()
    return whole.narrow(-1, group.rank() * each, each).contiguous()


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(gradient.clone(), ctx.group), None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_features(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own_features(gradient, ctx.group), None


class _SliceFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_features(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_features(gradient, ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        reduced = collectives.all_reduce(tensor, group)
        if reduced is tensor:
            ctx.mark_dirty(tensor)
        return reduced

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return SequenceReduceScatter(tensor.contiguous(), group).result()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.group), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sliced(gradient, ctx.group), None


class _SliceSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return sliced(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gathered(gradient, ctx.group), None
