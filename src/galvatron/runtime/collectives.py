"""The collectives of the runtime, on whole tensors along their first dim. Each returns when its result may be used."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

__all__ = ["all_gather", "all_reduce", "maximum", "reduce_scatter"]


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group, in place where the tensor is contiguous."""
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, group=group)
    return tensor


def maximum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Elementwise maximum over the group, in place."""
    dist.all_reduce(tensor, op=ReduceOp.MAX, group=group)
    return tensor


def all_gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The tensors of all ranks, in their order, joined along the first dim."""
    tensor = tensor.contiguous()
    joined = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(joined, tensor, group=group)
    return joined


def reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group, of which each rank keeps its part of the first dim."""
    tensor = tensor.contiguous()
    part = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    dist.reduce_scatter_tensor(part, tensor, group=group)
    return part
