"""The memory a rank uses: now, for people to see, and at the peak of one step, to compare with the plan."""

from __future__ import annotations

import os

import torch

from galvatron.rehearsal.memory import CpuMeter

__all__ = ["PeakMemory", "used_bytes"]

_METERED_STEPS = 2
"""From before the model is built to the end of this step on the CPU: then optimizer states exist, and it was in use."""


def used_bytes(device: torch.device) -> int:
    """Most tensors had on a GPU so far; on the CPU what the process has of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """Peak bytes of tensors, as the plan counts them. Made before the model.

    A GPU's allocator counts by itself. On the CPU allocations are followed until the second step ends; the copies that
    gloo makes count as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meter: CpuMeter | None = None
        self._peak = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._meter = CpuMeter()
            self._meter.__enter__()
            self._phase = self._meter.phase("training")
            self._phase.__enter__()

    def step_done(self, step_of_process: int) -> None:
        if self._meter is not None and step_of_process >= _METERED_STEPS:
            self._phase.__exit__(None, None, None)
            self._meter.__exit__(None, None, None)
            self._peak = self._meter.phases["training"].peak
            self._meter = None

    @property
    def bytes(self) -> int | None:
        """None while it is not known."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._peak or None
