"""Time of collectives and transfers, by ring volume and latency (docs/cost-model.md, "Communication").

Sizes are bytes of the whole message, times seconds; all functions take numpy arrays and broadcast. A group of one costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import Cluster, Collective, Factors, Link, degree_of

__all__ = [
    "Floats",
    "GroupLinks",
    "all_gather_s",
    "all_reduce_s",
    "all_to_all_s",
    "overlapped_s",
    "reduce_scatter_s",
    "ring_pass_s",
    "transfer_s",
]

Floats = NDArray[np.float64]
Passes = tuple[Floats, Floats]
"""Bytes a second, and seconds of latency, of one pass over a group."""


class GroupLinks:
    """What the groups of one axis get, an entry a strategy: size, and for each collective its bus bandwidth and the
    latency of a pass over the group."""

    __slots__ = ("_known", "_passes", "share", "size")

    def __init__(self, size: Floats, passes: Callable[[Collective], Passes]) -> None:
        self.size = size
        self.share = (size - 1) / size
        self._passes = passes
        self._known: dict[Collective, Passes] = {}

    @classmethod
    def of(cls, factors: Sequence[Factors], cluster: Cluster) -> GroupLinks:
        """Of groups whose members differ in these factors."""
        numbers = {each: number for number, each in enumerate(dict.fromkeys(factors))}
        places = np.array([numbers[each] for each in factors], dtype=np.intp)

        def passes(collective: Collective) -> Passes:
            links = [cluster.link(each, collective) for each in numbers]
            bytes_per_s, latency_s = [link.bytes_per_s for link in links], [link.latency_s for link in links]
            return np.array(bytes_per_s)[places], np.array(latency_s)[places]

        return cls(np.array([degree_of(each) for each in numbers], dtype=np.float64)[places], passes)

    @classmethod
    def rings_of(cls, factors: Sequence[Factors], cluster: Cluster) -> GroupLinks:
        """Of the same, whose members send to the next one each."""
        numbers = {each: number for number, each in enumerate(dict.fromkeys(factors))}
        places = np.array([numbers[each] for each in factors], dtype=np.intp)
        links = [cluster.pass_link(each) for each in numbers]
        rates = np.array([[link.bytes_per_s, link.latency_s] for link in links]).reshape(-1, 2)[places]
        size = np.array([degree_of(each) for each in numbers], dtype=np.float64)[places]
        return cls(size, lambda _: (rates[:, 0], rates[:, 1]))

    def at(self, places: NDArray[np.intp]) -> GroupLinks:
        """Of these strategies, each of which may be there several times."""

        def passes(collective: Collective) -> Passes:
            bytes_per_s, latency_s = self.passes(collective)
            return bytes_per_s[places], latency_s[places]

        return GroupLinks(self.size[places], passes)

    @classmethod
    def pair(cls, link: Link) -> GroupLinks:
        """Of two devices that are joined by this link."""
        one_pass = np.array([link.bytes_per_s]), np.array([link.latency_s])
        return cls(np.array([2.0]), lambda _: one_pass)

    def passes(self, collective: Collective) -> Passes:
        """What each group gets from its links for a collective."""
        if collective not in self._known:
            self._known[collective] = self._passes(collective)
        return self._known[collective]


def all_gather_s(message_bytes: Floats, group: GroupLinks) -> Floats:
    """Each rank moves (g−1)/g of the message."""
    return _pass_s(message_bytes, group, Collective.ALL_GATHER)


def reduce_scatter_s(message_bytes: Floats, group: GroupLinks) -> Floats:
    """The same volume as an all-gather."""
    return _pass_s(message_bytes, group, Collective.REDUCE_SCATTER)


def all_reduce_s(message_bytes: Floats, group: GroupLinks) -> Floats:
    """A reduce-scatter and an all-gather, so twice the volume."""
    return 2 * _pass_s(message_bytes, group, Collective.ALL_REDUCE)


def all_to_all_s(message_bytes: Floats, group: GroupLinks) -> Floats:
    """Each rank sends (g−1)/g of its message, a part to each other rank."""
    return _pass_s(message_bytes, group, Collective.ALL_TO_ALL)


def _pass_s(message_bytes: Floats, group: GroupLinks, collective: Collective) -> Floats:
    bytes_per_s, latency_s = group.passes(collective)
    seconds: Floats = message_bytes * group.share / bytes_per_s + latency_s
    return seconds


def ring_pass_s(message_bytes: Floats, group: GroupLinks) -> Floats:
    """Each rank sends a message to the next one; for :meth:`GroupLinks.rings_of`."""
    bytes_per_s, latency_s = group.passes(Collective.ALL_GATHER)
    seconds: Floats = message_bytes / bytes_per_s + latency_s
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
