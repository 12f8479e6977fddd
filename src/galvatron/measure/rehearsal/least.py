"""The least memory of a GPU that work can do with: its tensors, and what the allocator loses between them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from galvatron.processes.world import capped, shortages

__all__ = ["least_bytes"]

_MARGINS = (0.08, 0.05, 0.03, 0.02, 0.01, 0.005)
"""Beside the peak of tensors: what the allocator is tried with."""


def least_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Bytes that the allocator needs for the work, again and again, without running short. At most what it takes when
    it may have all; the work is of no use afterwards, for it may have been broken off.

    An allocator that runs short gives back what it kept, which waits for the GPU, and asks again. That it does so when
    the work first runs under a new limit counts nothing.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    tensors, enough = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    for margin in _MARGINS:
        limit = math.ceil(tensors * (1 + margin))
        if limit >= enough:
            continue
        try:
            with capped(device, limit):
                runs = _runs(work, device)
        except torch.OutOfMemoryError:  # others use the GPU, too
            break
        if not runs:
            break
        enough = limit
    return enough


def _runs(work: Callable[[], object], device: torch.device) -> bool:
    """Whether it runs without shortages, once it has run."""
    try:
        work()
        torch.cuda.synchronize(device)
        before = shortages(device)
        work()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return False
    return shortages(device) == before
