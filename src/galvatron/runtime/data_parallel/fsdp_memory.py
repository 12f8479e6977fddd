"""The memory of FSDP2's messages is taken from the stream that computes.

PyTorch's allocator gives no stream what belongs to another. FSDP2 takes what it gathers and reduces from the streams
that its messages run on, so that memory lies idle there while activations grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.runtime.collectives import all_gather_into, reduce_scatter_into

__all__ = ["FsdpAllGather", "FsdpReduceScatter", "in_backward"]

_Place = tuple[Tensor, torch.cuda.Event]
"""Memory, and when it is free."""


def in_backward() -> bool:
    """Whether autograd is running backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class FsdpAllGather:
    """What ``FSDPModule.set_custom_all_gather`` takes, for one layer.

    FSDP2's own takes two of the largest layers: 0.7 GB of 14 for Swin-Huge-32 with ZeRO-2.

    What was freed on the computing stream may still be read there, so gathering waits for all that stream was given
    before. In forward it gets its memory a layer early, so that it waits for that much less: FSDP2 gathers two layers
    ahead there. FSDP2 frees the result once the computing stream, which waits for it, was told to copy it; so what gets
    its memory next is written after the copy.
    """

    def __init__(self, device: torch.device, whole: Callable[[], bool]) -> None:
        """``whole``: whether the layer's parameters are gathered."""
        self._device, self._whole = device, whole
        self._computing = torch.cuda.current_stream(device)
        self._asked: tuple[tuple[int, ...], torch.dtype] | None = None
        self._place: _Place | None = None
        self.following: Sequence[FsdpAllGather] = ()
        """Those that forward gathers after it."""

    def expect(self) -> None:
        """Before each forward."""
        self.forget()
        self._computing = torch.cuda.current_stream(self._device)

    def forget(self) -> None:
        """Before each backward: leave no memory taken that was not used."""
        self._place = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        current = torch.cuda.current_stream(device)
        if current == self._computing:
            return torch.empty(*size, dtype=dtype, device=device)
        self._asked = tuple(size), dtype
        self._reserve()
        assert self._place is not None
        (output, free), self._place = self._place, None
        current.wait_event(free)
        if not in_backward():
            for other in self.following:
                if not other._whole():
                    other._reserve()
        return output

    def _reserve(self) -> None:
        if self._place is not None or self._asked is None:
            return
        size, dtype = self._asked
        with torch.cuda.stream(self._computing):
            output = torch.empty(*size, dtype=dtype, device=self._device)
        self._place = output, self._computing.record_event()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work: dist.Work | None = all_gather_into(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class FsdpReduceScatter:
    """What ``FSDPModule.set_custom_reduce_scatter`` takes, for one layer: gradients in the memory activations had.

    FSDP2's own takes all gradients: 0.3 GB of 12 for ViT-Huge-32 over 8 GPUs.

    FSDP2 first asks for the input's memory on the computing stream, lets its own stream wait for that one, and asks
    for the output's memory on its own stream. So whatever was freed on the computing stream is free for the output. The
    output is a gradient until the optimizer has used it, and computing has waited for it by then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computing = torch.cuda.current_stream(device)
        self._stays = True

    def expect(self, *, stays: bool) -> None:
        """Before each backward. ``stays``: what it reduces becomes the gradient, instead of being added to it and freed
        at once, perhaps long before the device has got there."""
        self._computing = torch.cuda.current_stream(self._device)
        self._stays = stays

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        current = torch.cuda.current_stream(device)
        if not self._stays or current == self._computing:
            return torch.empty(*size, dtype=dtype, device=device)
        with torch.cuda.stream(self._computing):
            output = torch.empty(*size, dtype=dtype, device=device)
        output.record_stream(current)
        return output

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        work: dist.Work | None = reduce_scatter_into(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work
