"""The operators of tensor parallelism with their gradients: Megatron's f and g, and those of sequence parallelism.

Each takes local tensors and the tensor-parallel group. Sequence is dim 1 of an activation (rows, tokens, features).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.runtime import collectives

__all__ = ["enter", "gather_sequence", "leave", "slice_sequence", "sum_sequence"]


def enter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """f: into the split part; the gradients of all ranks are summed in backward."""
    entered: Tensor = _Enter.apply(tensor, group)
    return entered


def leave(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """g: out of the split part; partial results of all ranks are summed."""
    left: Tensor = _Leave.apply(tensor, group)
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


def gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    """All tokens of a tensor divided along the sequence; no gradient."""
    rows, tokens, *tail = part.shape
    pieces = collectives.all_gather(part, group).view(group.size(), rows, tokens, *tail)
    return pieces.transpose(0, 1).reshape(rows, group.size() * tokens, *tail)


def sliced(whole: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's tokens; no gradient."""
    tokens = whole.shape[1] // group.size()
    return whole.narrow(1, group.rank() * tokens, tokens).contiguous()


def summed(whole: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's tokens of the sum over the group; no gradient."""
    rows, tokens, *tail = whole.shape
    pieces = whole.view(rows, group.size(), tokens // group.size(), *tail).transpose(0, 1)
    return collectives.reduce_scatter(pieces.reshape(group.size() * rows, tokens // group.size(), *tail), group)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return collectives.all_reduce(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
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
        return summed(tensor.contiguous(), group)

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
