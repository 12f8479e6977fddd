"""The gradient's norm over everything, and clipping by it, whatever each layer's strategy is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron.runtime.units import LocalParameter

__all__ = ["clip_", "gradient_norm"]


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
