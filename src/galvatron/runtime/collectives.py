"""The collectives of the runtime, on whole tensors along their first dim.

Functions return when their result may be used; the classes start a collective and give its result when asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup, ReduceOp

# Named anew in torch 2.13, where the old names warn.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

__all__ = [
    "AllGather",
    "AllReduce",
    "ReduceScatter",
    "all_gather",
    "all_gather_into",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "finish",
    "group_named",
    "maximum",
    "reduce_scatter",
    "reduce_scatter_into",
]


def finish(works: Iterable[dist.Work]) -> None:
    """Wait for all of these. The runtime waits for other ranks in this file or in ``pipeline/transfer.py`` alone: there
    ``processes/heartbeats.py`` knows that a rank waits, and does not blame it when a job hangs."""
    for work in works:
        work.wait()


class _Started:
    """A collective under way."""

    _work: dist.Work | None
    _result: Tensor

    def result(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._result


class AllReduce(_Started):
    """The sum over the group, in place where the tensor is contiguous."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        self._result = tensor.contiguous()
        self._work = dist.all_reduce(self._result, group=group, async_op=True)


class AllGather(_Started):
    """The tensors of all ranks, in their order, joined along the first dim."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        self._given = tensor.contiguous()
        self._result = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
        self._work = all_gather_into(self._result, self._given, group=group, async_op=True)


class ReduceScatter(_Started):
    """The sum over the group, of which each rank keeps its part of the first dim."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        self._given = tensor.contiguous()
        self._result = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
        self._work = reduce_scatter_into(self._result, self._given, group=group, async_op=True)


def all_reduce(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the group, in place where the tensor is contiguous."""
    return AllReduce(tensor, group).result()


def all_gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The tensors of all ranks, joined along the first dim."""
    return AllGather(tensor, group).result()


def reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the group, of which each rank keeps its part of the first dim."""
    return ReduceScatter(tensor, group).result()


def all_to_all(tensor: Tensor, sent: list[int] | None, received: list[int] | None, group: ProcessGroup) -> Tensor:
    """So many rows for each rank of the group, and from each, in the order of ranks; None: as many for all."""
    rows = len(tensor) if received is None else sum(received)
    result = tensor.new_empty((rows, *tensor.shape[1:]))
    dist.all_to_all_single(result, tensor.contiguous(), received, sent, group=group)
    return result


def maximum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Elementwise maximum over the group, in place."""
    dist.all_reduce(tensor, op=ReduceOp.MAX, group=group)
    return tensor


def group_named(name: str) -> ProcessGroup:
    """The group that has this name in this process: a compiled graph knows it by that."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def all_gather_object(value: Any, device: torch.device) -> list[Any]:
    """Everyone's value, in the order of ranks. NCCL sends it from the device that is current, which may be another."""
    gathered: list[Any] = [None] * dist.get_world_size()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        dist.all_gather_object(gathered, value)
    return gathered
