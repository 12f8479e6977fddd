"""A tied weight that another layer of the stage owns: used where it is, never stored twice.

The using module loses its own parameter and is lent the owner's tensor for the time of its forward. Where the two
layers split the vocabulary differently, the rows are gathered over the owner's group and cut as the user wants them;
gradients take the same way back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from galvatron.runtime import collectives
from galvatron.runtime.pieces import part_of

__all__ = ["SplitRowsOf", "lend", "resplit"]


def lend(user: nn.Module, name: str, owner: Callable[[], Tensor], prepare: Callable[[], None] | None = None) -> None:
    """Give ``user`` the tensor of ``owner()`` as its attribute ``name`` whenever it runs.

    ``prepare`` is called before each forward and before its backward (it gathers a sharded owner).
    """
    del user._parameters[name]
    setattr(user, name, None)

    def borrow(module: nn.Module, args: Any) -> None:
        if prepare is not None:
            prepare()
        setattr(module, name, owner())

    def give_back(module: nn.Module, args: Any, output: Tensor) -> None:
        setattr(module, name, None)
        if prepare is not None and output.requires_grad:
            output.register_hook(lambda gradient: prepare())

    user.register_forward_pre_hook(borrow, prepend=True)  # before it is entered, if it is a region of its own
    user.register_forward_hook(give_back)


@dataclass(frozen=True)
class SplitRowsOf:
    """How a layer splits the rows of a weight; no group: it does not."""

    group: ProcessGroup | None
    ranks: tuple[int, ...]


def resplit(weight: Tensor, rows: int, source: SplitRowsOf, target: SplitRowsOf) -> Tensor:
    """A weight split by rows one way (``rows`` in all), as the rows another split asks for."""
    if source.ranks == target.ranks:
        return weight
    whole = weight if source.group is None else _WholeRows.apply(weight, rows, source.group)
    if target.group is None:
        return whole
    mine = part_of(rows, target.group.rank(), target.group.size())
    return whole[mine.start : mine.stop]


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
