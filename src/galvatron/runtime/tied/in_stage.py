"""A tied weight that another layer of the stage owns: used where it is, never stored twice.

The using module loses its own parameter and is given the owner's tensor for the time of its forward. Where the two
layers split the vocabulary differently, the rows are gathered over the owner's group and cut as the user wants them;
gradients take the same way back.

A layer that tensor parallelism does not split is computed whole by each of its TP ranks. Every one of them then has the
same gradient, which must reach the owner once, and on each of the owner's ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from galvatron.families.layer import Layer
from galvatron.runtime import collectives
from galvatron.runtime.data_parallel.shards import part_of

__all__ = ["SplitRowsOf", "attach_tied", "resplit"]


def attach_tied(
    layer: Layer,
    parameter: str,
    owner: Callable[[], Tensor],
    like: Tensor,
    prepare: Callable[[], None] | None = None,
) -> None:
    """Give a layer the tensor of ``owner()`` in the place of its parameter of this name whenever what uses it runs.

    At other times there are NaNs of the dtype and on the device of ``like``: models ask a weight for these before they
    call its module. ``prepare`` is called before each forward and before its backward (it gathers a sharded owner).
    """
    path, _, name = parameter.rpartition(".")
    user, caller = layer.get_submodule(path), layer.caller(path)
    shape = user._parameters.pop(name).shape  # type: ignore[union-attr]  # it has one: it is tied
    stand_in = torch.full((), torch.nan, dtype=like.dtype, device=like.device).expand(shape)
    object.__setattr__(user, name, stand_in)  # no parameter of this module's, not even while it runs

    def attach(module: nn.Module, args: Any) -> None:
        if prepare is not None:
            prepare()
        object.__setattr__(user, name, owner())

    def detach(module: nn.Module, args: Any, output: Any) -> None:
        object.__setattr__(user, name, stand_in)
        if prepare is None:
            return
        for made in tree_leaves(output):
            if isinstance(made, Tensor) and made.requires_grad:
                made.register_hook(lambda gradient: prepare())

    caller.register_forward_pre_hook(attach, prepend=True)  # before it is entered, if it is a region of its own
    caller.register_forward_hook(detach)


@dataclass(frozen=True)
class SplitRowsOf:
    """How a layer's tensor-parallel ranks hold the rows of a weight."""

    group: ProcessGroup | None
    """Its TP ranks; None: the layer has no TP axis."""
    ranks: tuple[int, ...]
    split: bool
    """Whether each of them holds a part of the rows; else each holds and uses all of them."""


def resplit(weight: Tensor, rows: int, source: SplitRowsOf, target: SplitRowsOf) -> Tensor:
    """The owner's weight (``rows`` in all) as another layer uses it.

    The owner's own reduction sums its gradient over its data-parallel ranks. What other layers add must therefore be
    complete over the owner's TP ranks, and must come from each of the user's TP ranks in parts, or from one of them.
    """
    if source == target:
        return weight
    whole = weight
    if source.group is not None:
        whole = (_WholeRows if source.split else _SummedOver).apply(weight, rows, source.group)
    if target.group is None:
        return whole
    if target.split:
        mine = part_of(rows, target.group.rank(), target.group.size())
        return whole[mine.start : mine.stop]
    counted: Tensor = _CountedOnce.apply(whole, target.group)
    return counted


class _SummedOver(torch.autograd.Function):
    """The weight itself; backward sums what the ranks' uses of it gave."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: int, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_reduce(gradient.clone(), ctx.group), None, None


class _CountedOnce(torch.autograd.Function):
    """The weight itself; of the ranks that all compute the same gradient, only the first gives one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.group.rank() == 0 else torch.zeros_like(gradient), None


class _WholeRows(torch.autograd.Function):
    """All rows of a weight; backward sums what each rank's use of them gave."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, rows: int, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.held = group, part.shape[0]
        padded = _padded(part, -(-rows // group.size()))
        whole = collectives.all_gather(padded, group)
        return whole if whole.shape[0] == rows else whole[:rows].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        each = -(-gradient.shape[0] // ctx.group.size())
        total = collectives.reduce_scatter(_padded(gradient, each * ctx.group.size()), ctx.group)
        return total[: ctx.held], None, None


def _padded(tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])
