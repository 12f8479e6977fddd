"""FSDP2's reduce-scatter on GPUs, with gradients in the memory that activations had.

PyTorch's allocator gives no stream what belongs to another. FSDP2 takes the result of a reduce-scatter, the gradient,
from the stream that it runs on, so the memory of all gradients would lie idle while activations grow: 0.3 GB of 12 for
ViT-Huge-32 over 8 GPUs. Here it comes from the stream that computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.runtime.collectives import scatter_into

__all__ = ["ReduceScatter"]


class ReduceScatter:
    """What ``FSDPModule.set_custom_reduce_scatter`` takes, for one layer.

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
        work: dist.Work | None = scatter_into(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work
