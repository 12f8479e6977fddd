"""Ring attention: each rank has some tokens' queries, keys and values; keys and values go round.

The tokens of a ring of R ranks lie in zig-zag order: of 2R chunks of the sequence rank r has r and 2R−1−r, one behind
the other. Causal attention is then the same work for each rank in each step: its own tokens see each other along the
diagonal; all of its queries see the first chunk of a rank before it; its second chunk sees all of a rank behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.runtime import collectives
from galvatron.runtime.context.blocks import attend, attend_backward, merge, nothing_yet
from galvatron.runtime.context.cuts import Zigzag
from galvatron.runtime.tensor_parallel import operators

__all__ = ["ring_attention"]


def ring_attention(
    tensors: tuple[Tensor, Tensor, Tensor],
    runs: Tensor | None,
    ring: str,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of a ring, in zig-zag order.

    ``tensors``: query, key and value (rows, heads, tokens, width). ``runs``: of all tokens of the sequence, as of
    :class:`~galvatron.families.context.ContextMask`. ``ring``: the name of the group; empty: this rank has the whole
    sequence.
    """
    attended: Tensor = _node(list(tensors), runs, ring, causal, scale)[0]
    return attended


class _Ring:
    """The ranks of a ring."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())

    def before(self, step: int) -> int:
        """Whose keys and values this rank has in a step: that of the rank so many places before it."""
        return (self.rank - step) % self.size

    def pass_on(self, tensors: Sequence[Tensor]) -> _Passing:
        """To the next rank, and from the one before."""
        assert self.group is not None
        peers = [dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)]
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        operations = [dist.P2POp(dist.isend, tensor, peers[0], self.group) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, peers[1], self.group) for tensor in received]
        return _Passing(dist.batch_isend_irecv(operations), sent, received)


@dataclass(frozen=True, slots=True)
class _Passing:
    """Tensors on their way."""

    works: list[dist.Work]
    sent: list[Tensor]
    """Which must be kept until they are gone."""
    received: list[Tensor]

    def result(self) -> list[Tensor]:
        collectives.finish(self.works)
        return self.received


def _ring(name: str) -> _Ring:
    return _Ring(collectives.group_named(name) if name else None)


# One node of a graph, which a layer that is recomputed in part keeps: see ``galvatron.runtime.selective``.

_SETTINGS = "Tensor? runs, str ring, bool causal, float scale"


@operators.node("attend_over_ring", f"(Tensor[] tensors, {_SETTINGS}) -> (Tensor, Tensor)")
def _node(tensors: list[Tensor], runs: Tensor | None, ring: str, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What queries attend to among keys and values, and the log-sum-exp of all their scores."""
    query, *held = tensors
    ranks = _ring(ring)
    tokens = Zigzag(ranks.size, query.shape[2])
    output, lse = nothing_yet(query, held[1].shape[-1])
    for step in range(ranks.size):
        passing = ranks.pass_on(held) if step + 1 < ranks.size else None
        for cut in tokens.cuts(ranks.rank, ranks.before(step), runs, causal=causal):
            found = attend(*cut.of(query, (held[0], held[1])), diagonal=cut.diagonal, scale=scale, regular=runs is None)
            merge((output[cut.rows], lse[cut.rows]), cut.queries, found)
        if passing is not None:
            held = passing.result()
    return output.to(query.dtype), lse


@_node.register_fake
def _(tensors: list[Tensor], runs: Tensor | None, ring: str, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    query, _, value = tensors
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((*query.shape[:-1], value.shape[-1])), query.new_empty(query.shape[:-1], dtype=wide)


@operators.node("backward_of_attend_over_ring", f"(Tensor gradient, Tensor[] saved, {_SETTINGS}) -> Tensor[]")
def _backward_node(
    gradient: Tensor, saved: list[Tensor], runs: Tensor | None, ring: str, causal: bool, scale: float
) -> list[Tensor]:
    """Gradients of keys and values follow these round, each rank adds its part, and after the last step they are back
    where they belong."""
    output, lse, query, *held = saved
    ranks = _ring(ring)
    tokens = Zigzag(ranks.size, query.shape[2])
    by_query, *sums = (tensor.new_zeros(tensor.shape, dtype=lse.dtype) for tensor in (query, *held))
    coming: _Passing | None = None
    for step in range(ranks.size):
        passing = ranks.pass_on(held) if step + 1 < ranks.size else None
        parts = []
        for cut in tokens.cuts(ranks.rank, ranks.before(step), runs, causal=causal):
            outer, *result = (tensor[cut.rows, :, cut.queries] for tensor in (gradient, output, lse))
            by_cut, *found = attend_backward(
                outer, cut.of(query, (held[0], held[1])), (result[0], result[1]),
                diagonal=cut.diagonal, scale=scale, regular=runs is None,
            )  # fmt: skip
            by_query[cut.rows, :, cut.queries] += by_cut
            parts.append((cut, found))
        if coming is not None:
            sums = coming.result()
        for cut, found in parts:
            for total, part in zip(sums, found, strict=True):
                total[cut.rows, :, cut.keys] += part
        coming = ranks.pass_on(sums) if ranks.size > 1 else None
        if passing is not None:
            held = passing.result()
    if coming is not None:
        sums = coming.result()
    return [total.to(query.dtype) for total in (by_query, *sums)]


@_backward_node.register_fake
def _(
    gradient: Tensor, saved: list[Tensor], runs: Tensor | None, ring: str, causal: bool, scale: float
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in saved[2:]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, runs, *ctx.settings = inputs
    ctx.save_for_backward(*output, *tensors, runs)


def _give_back(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    *saved, runs = ctx.saved_tensors
    return _backward_node(gradient, saved, runs, *ctx.settings), None, None, None, None


_node.register_autograd(_give_back, setup_context=_keep)
