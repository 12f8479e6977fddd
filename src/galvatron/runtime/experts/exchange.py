"""How tokens travel, with their gradients: to their experts' ranks and back, and among ranks with the same tokens.

Tokens are the rows of a tensor. Gradients are those of the whole loss by a rank's own tokens, so each way back is the
way there in the opposite direction, and nothing is averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.runtime import collectives
from galvatron.runtime.data_parallel.shards import part_of
from galvatron.runtime.selective import keeping
from galvatron.runtime.tensor_parallel import operators

__all__ = ["Routing", "exchange", "gather_tokens", "slice_tokens"]


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where the copies of a rank's tokens go, one copy for each expert chosen for a token."""

    order: Tensor
    """The copies (token × chosen + place) in the order in which they are sent: by expert, and so by rank."""
    sent: list[int]
    """Copies for each rank of the group."""
    received: list[int]
    """Copies from each."""
    experts: Tensor
    """Of each copy that is received: which of this rank's experts it is for."""

    @classmethod
    def of(cls, index: Tensor, count: int, group: ProcessGroup) -> Routing:
        """``index``: the experts chosen for each token (tokens, chosen), of ``count`` that the group has together, each
        rank as many as the others, in order."""
        chosen = index.reshape(-1).long()
        ranks = group.size()
        here = count // ranks
        sending = chosen.new_zeros(count).scatter_add_(0, chosen, torch.ones_like(chosen))
        if keeping():
            receiving = _counts_node(sending, group.group_name).view(ranks, here)
        else:
            receiving = collectives.all_to_all(sending, None, None, group).view(ranks, here)
        # The one place where the processor waits for the device.
        sent, received = torch.stack([sending.view(ranks, here).sum(1), receiving.sum(1)]).tolist()
        numbers = torch.arange(here, device=index.device).repeat(ranks)
        return cls(
            order=torch.argsort(chosen, stable=True),
            sent=sent,
            received=received,
            experts=numbers.repeat_interleave(receiving.flatten(), output_size=sum(received)),
        )


def exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """So many rows for each rank of the group, and from each."""
    if keeping():
        node: Tensor = _exchange_node(rows, sent, received, group.group_name)
        return node
    arrived: Tensor = _Exchange.apply(rows, sent, received, group)
    return arrived


def slice_tokens(tokens: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part of tokens that all ranks of the group have; backward gathers."""
    part: Tensor = _SliceTokens.apply(tokens, group)
    return part


def gather_tokens(part: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """All ``count`` tokens again. Every rank then computes the same, so backward just slices."""
    if keeping():
        node: Tensor = _gather_node(part, count, group.group_name)
        return node
    whole: Tensor = _GatherTokens.apply(part, count, group)
    return whole


def _sliced(tokens: Tensor, group: ProcessGroup) -> Tensor:
    mine = part_of(len(tokens), group.rank(), group.size())
    return tokens[mine.start : mine.stop].clone()  # a view would keep all of them alive


def _gathered(part: Tensor, count: int, group: ProcessGroup) -> Tensor:
    each = -(-count // group.size())
    if len(part) < each:  # the last ranks have fewer where the tokens do not divide
        part = torch.cat([part, part.new_zeros(each - len(part), *part.shape[1:])])
    whole = collectives.all_gather(part, group)
    return whole if len(whole) == count else whole[:count].clone()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return collectives.all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return collectives.all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class _SliceTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: ProcessGroup) -> Tensor:
        ctx.count, ctx.group = len(tokens), group
        return _sliced(tokens, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.count, ctx.group), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, count: int, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(part, count, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sliced(gradient, ctx.group), None, None


# The same as one operation each, for layers that keep what came from other ranks. None is ever compiled: how many rows
# come is known only when they are counted.


@operators.node("counts", "(Tensor counts, str group) -> Tensor", sends=True)
def _counts_node(counts: Tensor, group: str) -> Tensor:
    return collectives.all_to_all(counts, None, None, collectives.group_named(group))


@operators.node("exchange", "(Tensor rows, int[] sent, int[] received, str group) -> Tensor", sends=True)
def _exchange_node(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    return collectives.all_to_all(rows, sent, received, collectives.group_named(group))


@operators.node("gather_tokens", "(Tensor part, int count, str group) -> Tensor", sends=True)
def _gather_node(part: Tensor, count: int, group: str) -> Tensor:
    return _gathered(part, count, collectives.group_named(group))


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.sent, ctx.received, ctx.group = inputs


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.group = inputs


_exchange_node.register_autograd(
    lambda ctx, gradient: (
        collectives.all_to_all(gradient, ctx.received, ctx.sent, collectives.group_named(ctx.group)), None, None, None,
    ),
    setup_context=_keep_exchange,
)  # fmt: skip
_gather_node.register_autograd(
    lambda ctx, gradient: (_sliced(gradient, collectives.group_named(ctx.group)), None, None),
    setup_context=_keep_gather,
)
