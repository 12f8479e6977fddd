"""Time of collectives and transfers, by ring volume and latency (docs/cost-model.md, "Communication").

Sizes are bytes of the whole message, times seconds; all functions take numpy arrays and broadcast. A group of one costs
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import Cluster, Collective, Factor

__all__ = ["Floats", "GroupLinks", "all_gather_s", "all_reduce_s", "overlapped_s", "reduce_scatter_s", "transfer_s"]

Floats = NDArray[np.float64]
Passes = tuple[Floats, Floats]
"""Bytes a second, and seconds of latency, of one pass over a group."""


class GroupLinks:
    """What the groups of one axis get, an entry a strategy: size, and for each collective the bandwidth of its ring and
    the latency of a pass over the group."""

    __slots__ = ("all_gather", "all_reduce", "reduce_scatter", "share", "size")

    def __init__(self, size: Floats, all_gather: Passes, reduce_scatter: Passes, all_reduce: Passes) -> None:
        self.size = size
        self.share = (size - 1) / size
        self.all_gather, self.reduce_scatter, self.all_reduce = all_gather, reduce_scatter, all_reduce

    @classmethod
    def of(cls, sizes: Sequence[int], factors: Sequence[frozenset[Factor]], cluster: Cluster) -> GroupLinks:
        """Of groups whose members differ in these factors."""

        def passes(collective: Collective) -> Passes:
            links = [cluster.link(each, collective) for each in factors]
            return np.array([link.bytes_per_s for link in links]), np.array([link.latency_s for link in links])

        return cls(
            np.array(sizes, dtype=np.float64),
            passes(Collective.ALL_GATHER),
            passes(Collective.REDUCE_SCATTER),
            passes(Collective.ALL_REDUCE),
        )


def all_gather_s(message_bytes: Floats, group: GroupLinks) -> Floats:
    """Each rank moves (g−1)/g of the message."""
    return _pass_s(message_bytes, group, group.all_gather)


def reduce_scatter_s(message_bytes: Floats, group: GroupLinks) -> Floats:
    """The same volume as an all-gather."""
    return _pass_s(message_bytes, group, group.reduce_scatter)


def all_reduce_s(message_bytes: Floats, group: GroupLinks) -> Floats:
    """A reduce-scatter and an all-gather, so twice the volume."""
    return 2 * _pass_s(message_bytes, group, group.all_reduce)


def _pass_s(message_bytes: Floats, group: GroupLinks, passes: Passes) -> Floats:
    bytes_per_s, latency_s = passes
    seconds: Floats = message_bytes * group.share / bytes_per_s + latency_s
    return seconds


def transfer_s(message_bytes: Floats, bytes_per_s: float, latency_s: float) -> Floats:
    """Point-to-point transfer between two stages."""
    seconds: Floats = message_bytes / bytes_per_s + latency_s
    return seconds


def overlapped_s(compute_s: Floats, communicate_s: Floats, slowdown: float) -> Floats:
    """Time of both together: each is slowed by the factor while both run, and what is left of the longer one then runs
    alone at full speed."""
    seconds: Floats = np.maximum(compute_s, communicate_s) + (slowdown - 1) * np.minimum(compute_s, communicate_s)
    return seconds
