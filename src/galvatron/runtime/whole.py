"""What concerns the whole model, put together from all ranks: the gradient's norm and clipping, whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron.families.layer import LayeredModel
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
    """(name, whole tensor) for each parameter, the same on every rank; ``pick``: what of it (its value, gradient …).

    All ranks must take all of them. Each piece is added by one of the ranks that hold it, so sums are exact.
    """
    held = {local.name: local for local in locals_}
    for name, shape in shapes.items():
        total = torch.zeros(shape, dtype=dtype, device=device)
        local = held.get(name)
        if local is not None and local.primary:
            part = pick(local)
            if part is not None and part.numel():
                local.shard.put(part, total)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        yield name, total
