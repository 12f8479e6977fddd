"""Time of collectives and transfers, by ring volume and latency (docs/cost-model.md, "Communication").

Sizes are bytes of the whole message, times seconds; all functions take numpy arrays and broadcast. A group of one costs
nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "GroupLinks", "all_gather_s", "all_reduce_s", "transfer_s"]

Floats = NDArray[np.float64]


class GroupLinks:
    """What the groups of one axis get, an entry a strategy: size, ring bandwidth, latency of a pass over the group."""

    __slots__ = ("bytes_per_s", "latency_s", "share", "size")

    def __init__(self, size: Floats, bytes_per_s: Floats, latency_s: Floats) -> None:
        self.size, self.bytes_per_s, self.latency_s = size, bytes_per_s, latency_s
        self.share = (size - 1) / size


def all_gather_s(message_bytes: Floats, group: GroupLinks) -> Floats:
    """All-gather or reduce-scatter: each rank moves (g−1)/g of the message."""
    seconds: Floats = message_bytes * group.share / group.bytes_per_s + group.latency_s
    return seconds


def all_reduce_s(message_bytes: Floats, group: GroupLinks) -> Floats:
    """All-reduce: a reduce-scatter and an all-gather, so twice the volume."""
    return 2 * all_gather_s(message_bytes, group)


def transfer_s(message_bytes: Floats, bytes_per_s: float, latency_s: float) -> Floats:
    """Point-to-point transfer between two stages."""
    seconds: Floats = message_bytes / bytes_per_s + latency_s
    return seconds
