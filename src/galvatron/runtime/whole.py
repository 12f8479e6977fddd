"""What concerns the whole model, put together from all ranks: the gradient's norm and clipping, whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron.families.layer import LayeredModel
from galvatron.runtime.collectives import all_gather_object, finish
from galvatron.runtime.data_parallel.shards import ParameterShard
from galvatron.runtime.data_parallel.units import LocalParameter

__all__ = ["clip_", "gradient_norm", "shapes_of", "whole"]


@torch.no_grad()
def gradient_norm(parameters: Sequence[LocalParameter], device: torch.device) -> Tensor:
    """The 2-norm of the whole model's gradient, the same on every rank.

    Each rank adds up the squares of what it holds, each piece divided by the number of ranks that hold it too; copies
    of tied weights in other stages are left out.
    """
    by_replicas: dict[int, list[Tensor]] = {}
    for local in parameters:
        if local.counted and local.master.grad is not None:
            by_replicas.setdefault(local.replicas, []).append(local.master.grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for replicas, gradients in by_replicas.items():
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        total += norms.square().sum() / replicas
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_(parameters: Sequence[LocalParameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients so that their norm is at most ``limit``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    gradients = [local.master.grad for local in parameters if local.master.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


def shapes_of(layered: LayeredModel) -> dict[str, tuple[int, ...]]:
    """Every parameter of a model by its stock name, tied ones once, in the model's order."""
    owners = {use: tie.uses[0] for tie in layered.ties for use in tie.uses}
    shapes: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(layered.layers):
        tied = {use.name: owner for use, owner in owners.items() if use.layer == index}
        for name, parameter in layer.named_parameters():
            owner = tied.get(name)
            stock = layer.stock_name(name) if owner is None else layered.layers[owner.layer].stock_name(owner.name)
            shapes.setdefault(stock, tuple(parameter.shape))
    return shapes


@torch.no_grad()
def whole(
    locals_: Sequence[LocalParameter],
    shapes: Mapping[str, tuple[int, ...]],
    pick: Callable[[LocalParameter], Tensor | None],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) for each parameter, on every rank; ``pick``: what of it (its value, gradient …).

    All ranks must take all of them. A rank is sent the pieces that it does not hold, and no others, each by one of
    those that hold it; they take turns.
    """
    held = {local.name: local for local in locals_}
    pieces = _pieces(locals_, device)
    for name, shape in shapes.items():
        total = torch.zeros(shape, dtype=dtype, device=device)
        local = held.get(name)
        own = None
        if local is not None:
            picked = pick(local)
            own = torch.zeros_like(local.master) if picked is None else picked.detach()
            own = own.to(device, dtype)
            local.shard.put(own, total)
        _exchange(pieces.get(name, []), own, total)
        yield name, total


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a parameter, and who holds it."""

    shard: ParameterShard
    holders: tuple[int, ...]
    others: tuple[int, ...]
    """Who has to be sent it."""


def _pieces(locals_: Sequence[LocalParameter], device: torch.device) -> dict[str, list[_Piece]]:
    """Of each parameter the pieces that make up the whole, the same on every rank."""
    if dist.get_world_size() == 1:
        return {}
    mine = [(local.name, local.shard, local.primary) for local in locals_]
    found: list[list[tuple[str, ParameterShard, bool]]] = all_gather_object(mine, device)
    everyone = [{name: shard for name, shard, _ in own} for own in found]
    pieces: dict[str, list[_Piece]] = {}
    for name, shard, primary in (each for own in found for each in own):
        if not primary or not shard.numel:
            continue
        holders = tuple(rank for rank, held in enumerate(everyone) if held.get(name) == shard)
        others = tuple(
            rank
            for rank, held in enumerate(everyone)
            if rank not in holders and not (name in held and held[name].is_whole)
        )
        pieces.setdefault(name, []).append(_Piece(shard, holders, others))
    return pieces


def _exchange(pieces: Sequence[_Piece], own: Tensor | None, total: Tensor) -> None:
    """Send what this rank holds to those that do not, and put what it receives into its place."""
    rank = dist.get_rank()
    operations: list[dist.P2POp] = []
    received: list[tuple[_Piece, Tensor]] = []
    for piece in pieces:
        for turn, other in enumerate(piece.others):
            sender = piece.holders[turn % len(piece.holders)]
            if sender == rank and own is not None:
                operations.append(dist.P2POp(dist.isend, own.contiguous(), other))
            elif other == rank:
                received.append((piece, total.new_empty(piece.shard.size)))
                operations.append(dist.P2POp(dist.irecv, received[-1][1], sender))
    finish(dist.batch_isend_irecv(operations) if operations else ())
    for piece, tensor in received:
        piece.shard.put(tensor, total)
