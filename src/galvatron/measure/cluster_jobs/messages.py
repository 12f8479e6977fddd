"""How large the messages are that links are measured with: as large as training's, unless a slow link would take too
long over them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from galvatron.processes.peers import Peers

__all__ = ["USUAL", "Sizes", "sizes_for", "sizes_within"]

Sizes = tuple[int, int, int]
"""Bytes of a message: where latency counts, where a layer's activations are, where its gradients are."""
USUAL: dict[str, Sizes] = {"cpu": (1 << 14, 1 << 18, 1 << 21), "cuda": (1 << 16, 1 << 22, 1 << 26)}
_LONGEST_S = 0.25
"""A message of all but the slowest links takes no longer, so that everything is measured in a minute or two."""
_SPAN = 16
"""The largest message is at least so many times the smallest, so that a line through them has a slope."""

_TRIES = 3
"""The quickest counts: a pause of the machine must not make a fast link's messages small."""


def sizes_for(send: Callable[[int], object], peers: Peers) -> Sizes:
    """The sizes for a link, by what a first message over it takes; ``send``: sends one of so many bytes. The same on
    every rank."""
    usual = USUAL[peers.device.type]
    send(usual[0])  # connections are made by the first
    tries = []
    for _ in range(_TRIES):
        peers.wait_for_device()
        peers.meet()
        started = time.perf_counter()
        send(usual[1])
        peers.wait_for_device()
        tries.append(time.perf_counter() - started)
    return sizes_within(usual, max(peers.gather(min(tries))))


def sizes_within(usual: Sizes, middle_s: float) -> Sizes:
    """What is left of the usual sizes, in powers of two, where the middle one takes so long."""
    small, middle, large = usual
    affordable = 2 ** math.floor(math.log2(middle * _LONGEST_S / middle_s))
    if affordable >= large:
        return usual
    largest = max(small * _SPAN, affordable)
    return small, 2 ** ((small * largest).bit_length() // 2), largest
