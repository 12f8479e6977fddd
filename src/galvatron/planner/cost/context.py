"""What attention over divided sequences takes longer than over whole ones (docs/cost-model.md, "Context parallelism").

Each rank computes an equal share of the layer: its tokens' part of products and norms, and of attention some heads
under Ulysses, while in a ring the zig-zag order makes causal work equal. On top come the exchanges. Attention itself
takes the layer's time times its part of the layer's operations, unless somebody measures it apart.

Gathers of parameters and sums of gradients go over the same links at the same time, and slow the exchanges down.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron.core.spec import Cluster, Precision
from galvatron.planner.cost.arrays import LayerArrays, StrategyArrays
from galvatron.planner.cost.communication import Floats, GroupLinks, all_to_all_s, overlapped_s, ring_pass_s

__all__ = ["Exchange", "exchanges"]

_SUM_BYTES = Precision.FP32.bytes
"""Results of a ring's steps, and gradients of keys and values, are added up in fp32."""
_MERGED = 8
"""Reads and writes of fp32 cells for each value of a result when it is merged with those of other steps by their
log-sum-exp: scale what is there (2), widen (1) and scale (2) the new, add (3)."""
_ADDED = 3
"""… and when a gradient is added."""
_TINY_S = 1e-12
"""Less than anything takes."""


@dataclass(frozen=True, slots=True)
class Ring:
    """What goes round a ring in a pass, and the attention that is computed meanwhile, in seconds."""

    passed_s: Floats
    beside_s: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Seconds that a pass through a layer takes longer, forward or backward, of a micro-batch."""

    waited_s: Floats
    """Messages beside which nothing is computed: Ulysses' exchanges, and a ring's last sums on their way home."""
    rings: tuple[Ring, ...]
    """Keys, values and their gradients on their way round; where a layer is recomputed, of both its passes."""
    merged_s: Floats
    """Results of a ring's steps put together."""

    def seconds(self, compute_s: Floats, messages_s: Floats, cluster: Cluster) -> Floats:
        """Of the whole pass, which computes so long and beside that has other messages to send.

        While these last, exchanges get a part of the links and computation is slower. They last as long as what is left
        of the links takes, and what is then not sent yet is waited for.
        """
        factor, slowdown = cluster.message_contention, cluster.overlap_slowdown
        alone = self._alone_s(compute_s, 1.0, slowdown)
        slowed = self._alone_s(compute_s, factor, slowdown)
        room = slowed - self.waited_s - sum(ring.passed_s for ring in self.rings)
        beside = np.minimum(messages_s, room)
        longer = slowed + (slowdown - 1) * compute_s - alone
        seconds: Floats = alone + beside / np.maximum(room, _TINY_S) * longer + messages_s - beside
        return seconds

    def _alone_s(self, compute_s: Floats, factor: float, slowdown: float) -> Floats:
        """The pass without other messages, where its own take so many times as long."""
        seconds: Floats = compute_s + self.merged_s + factor * self.waited_s
        for ring in self.rings:
            seconds = seconds + overlapped_s(ring.beside_s, factor * ring.passed_s, slowdown) - ring.beside_s
        return seconds


def exchanges(
    samples: Floats, layers: LayerArrays, strategies: StrategyArrays, cluster: Cluster, precision: Precision
) -> tuple[Exchange, Exchange]:
    """Forward and backward of a micro-batch. ``samples``: a device's share of them, parts of samples too."""
    tensor = np.where(layers.splits > 0, strategies.tp.size, 1.0)
    query = samples * layers.context.query_bytes / tensor
    key_value = samples * layers.context.key_value_bytes / tensor
    attention = samples * layers.context.share
    ring, divided = strategies.ring, query > 0
    passes = divided * (ring.size - 1) * ring_pass_s(key_value, ring)
    sums = divided * (ring.size > 1) * ring_pass_s(key_value * _SUM_BYTES / precision.bytes, ring)
    beside = divided * (ring.size - 1) / ring.size
    exchange = divided * _exchange_s(query, key_value, strategies.ulysses)

    # One fp32 cell read or written for each value of so many bytes, in each step. Of causal attention half of the steps
    # but the first have half of the queries, and the others half of the keys.
    steps = (ring.size > 1) * np.where(layers.context.causal, (3 * ring.size + 1) / 4, ring.size)
    touched_s = steps / precision.bytes * _SUM_BYTES / cluster.device.memory_bytes_per_s

    around = Ring(passes, beside * attention * layers.forward_s)
    forward = Exchange(waited_s=exchange, rings=(around,), merged_s=_MERGED * touched_s * query)
    # Keys and values go round once more, and their gradients with them. These take one step more to come home. Where
    # the layer is recomputed all of forward comes again.
    there, again = layers.has_backward, layers.has_backward * strategies.recompute
    back = Ring(there * (passes + (ring.size - 1) * sums), there * beside * attention * layers.backward_s)
    backward = Exchange(
        waited_s=there * (exchange + sums) + again * forward.waited_s,
        rings=(back, Ring(again * around.passed_s, again * around.beside_s)),
        merged_s=there * _ADDED * touched_s * (query + key_value) + again * forward.merged_s,
    )
    return forward, backward


def _exchange_s(query: Floats, key_value: Floats, group: GroupLinks) -> Floats:
    """Ulysses: queries, keys and values there, the result back. Backward sends as much the other way."""
    seconds: Floats = 2 * all_to_all_s(query, group) + 2 * all_to_all_s(key_value / 2, group)
    return seconds
