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
from galvatron.runtime.context.blocks import Seen, attend, attend_backward, merge, nothing_yet
from galvatron.runtime.tensor_parallel import operators

__all__ = ["ring_attention"]

_ALL = slice(None)


def ring_attention(
    tensors: tuple[Tensor, Tensor, Tensor],
    masks: tuple[Tensor | None, Tensor | None],
    ring: str,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of a ring, in zig-zag order.

    ``tensors``: query, key and value (rows, heads, tokens, width). ``masks``: of all tokens of the sequence, in order,
    the number of each one's document, and whether it is no padding (rows, tokens). ``ring``: the name of the group;
    empty: this rank has the whole sequence.
    """
    none = torch.empty(0, device=tensors[0].device)
    given = [none if mask is None else mask for mask in masks]
    attended: Tensor = _node(list(tensors), given, ring, causal, scale)[0]
    return attended


@dataclass(frozen=True, slots=True)
class _Masks:
    """Documents and padding of the whole sequence."""

    documents: Tensor | None
    kept: Tensor | None

    @classmethod
    def of(cls, masks: Sequence[Tensor]) -> _Masks:
        return cls(*(mask if mask.numel() else None for mask in masks))

    def seen(self, queries: Tensor, keys: Tensor, *, diagonal: bool) -> Seen:
        """Between tokens with these numbers."""
        own = self.documents
        return Seen(
            diagonal,
            None if own is None else own[:, queries],
            None if own is None else own[:, keys],
            None if self.kept is None else self.kept[:, keys],
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """What this rank computes while it has the keys and values of one rank."""

    queries: slice
    """Of its own tokens."""
    keys: slice
    """Of the other's tokens."""
    seen: Seen

    def of(self, query: Tensor, held: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Its part of this rank's queries, and of the keys and values that this rank has."""
        key, value = held
        return query[:, :, self.queries], key[:, :, self.keys], value[:, :, self.keys]


class _Ring:
    """The ranks of a ring, and what each computes when."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())

    def tokens(self, rank: int, count: int, device: torch.device) -> Tensor:
        """The numbers of a rank's tokens, of which each has so many."""
        if self.size == 1:
            return torch.arange(count, device=device)
        chunk = count // 2
        places = torch.arange(chunk, device=device)
        return torch.cat([rank * chunk + places, (2 * self.size - 1 - rank) * chunk + places])

    def block(self, step: int, query: Tensor, masks: _Masks, *, causal: bool) -> _Block:
        """In a step this rank has what the rank so many places before it has."""
        count, device = query.shape[2], query.device
        source = (self.rank - step) % self.size
        queries, keys = _ALL, _ALL
        if causal and source < self.rank:
            keys = slice(0, count // 2)
        elif causal and source > self.rank:
            queries = slice(count // 2, count)
        diagonal = causal and source == self.rank
        if masks.documents is None and masks.kept is None:
            return _Block(queries, keys, Seen(diagonal))
        own, others = (self.tokens(rank, count, device) for rank in (self.rank, source))
        return _Block(queries, keys, masks.seen(own[queries], others[keys], diagonal=diagonal))

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
        for work in self.works:
            work.wait()
        return self.received


def _ring(name: str) -> _Ring:
    return _Ring(collectives.group_named(name) if name else None)


# One node of a graph, which a layer that is recomputed in part keeps: see ``galvatron.runtime.selective``.

_SETTINGS = "Tensor[] masks, str ring, bool causal, float scale"
"""Masks: documents and what is kept, of no size where there are none."""


@operators.node("attend_over_ring", f"(Tensor[] tensors, {_SETTINGS}) -> (Tensor, Tensor)")
def _node(tensors: list[Tensor], masks: list[Tensor], ring: str, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What queries attend to among keys and values, and the log-sum-exp of all their scores."""
    query, *held = tensors
    ranks, marks = _ring(ring), _Masks.of(masks)
    total = nothing_yet(query, held[1].shape[-1])
    for step in range(ranks.size):
        passing = ranks.pass_on(held) if step + 1 < ranks.size else None
        block = ranks.block(step, query, marks, causal=causal)
        merge(total, block.queries, attend(*block.of(query, held), block.seen, scale))
        if passing is not None:
            held = passing.result()
    return total[0].to(query.dtype), total[1]


@_node.register_fake
def _(tensors: list[Tensor], masks: list[Tensor], ring: str, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    query, _, value = tensors
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((*query.shape[:-1], value.shape[-1])), query.new_empty(query.shape[:-1], dtype=wide)


@operators.node("backward_of_attend_over_ring", f"(Tensor gradient, Tensor[] saved, {_SETTINGS}) -> Tensor[]")
def _backward_node(
    gradient: Tensor, saved: list[Tensor], masks: list[Tensor], ring: str, causal: bool, scale: float
) -> list[Tensor]:
    """Gradients of keys and values follow these round, each rank adds its part, and after the last step they are back
    where they belong."""
    output, lse, query, *held = saved
    ranks, marks = _ring(ring), _Masks.of(masks)
    by_query, *sums = (tensor.new_zeros(tensor.shape, dtype=lse.dtype) for tensor in (query, *held))
    coming: _Passing | None = None
    for step in range(ranks.size):
        passing = ranks.pass_on(held) if step + 1 < ranks.size else None
        block = ranks.block(step, query, marks, causal=causal)
        own = block.queries
        outer = (output[:, :, own], lse[:, :, own])
        found = attend_backward(gradient[:, :, own], block.of(query, held), outer, block.seen, scale)
        by_query[:, :, own] += found[0]
        if coming is not None:
            sums = coming.result()
        for total, part in zip(sums, found[1:], strict=True):
            total[:, :, block.keys] += part
        coming = ranks.pass_on(sums) if ranks.size > 1 else None
        if passing is not None:
            held = passing.result()
    if coming is not None:
        sums = coming.result()
    return [total.to(query.dtype) for total in (by_query, *sums)]


@_backward_node.register_fake
def _(
    gradient: Tensor, saved: list[Tensor], masks: list[Tensor], ring: str, causal: bool, scale: float
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in saved[2:]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, masks, *ctx.settings = inputs
    ctx.save_for_backward(*output, *tensors, *masks)


def _give_back(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    *saved, documents, kept = ctx.saved_tensors
    found = _backward_node(gradient, saved, [documents, kept], *ctx.settings)
    return found, [None, None], None, None, None


_node.register_autograd(_give_back, setup_context=_keep)
