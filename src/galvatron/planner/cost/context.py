"""What attention over divided sequences takes longer than over whole ones (docs/cost-model.md, "Context parallelism").

Each rank computes an equal share of the layer: its tokens' part of products and norms, and of attention some heads
under Ulysses, while in a ring the zig-zag order makes causal work equal. On top come the exchanges. Attention itself
takes the layer's time times its part of the layer's operations, unless somebody measures it apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import Cluster, Precision
from galvatron.planner.cost.arrays import LayerArrays, StrategyArrays
from galvatron.planner.cost.communication import Floats, GroupLinks, all_to_all_s, overlapped_s, ring_pass_s

__all__ = ["context_s"]

_SUM_BYTES = Precision.FP32.bytes
"""Results of a ring's steps, and gradients of keys and values, are added up in fp32."""
_MERGED = 8
"""Reads and writes of fp32 cells for each value of a result when it is merged with those of other steps by their
log-sum-exp: scale what is there (2), widen (1) and scale (2) the new, add (3)."""
_ADDED = 3
"""… and when a gradient is added."""


def context_s(
    samples: Floats, layers: LayerArrays, strategies: StrategyArrays, cluster: Cluster, precision: Precision
) -> Floats:
    """Seconds of a micro-batch, forward and backward. ``samples``: a device's share of them, parts of samples too."""
    tensor = np.where(layers.splits > 0, strategies.tp.size, 1.0)
    query = samples * layers.context.query_bytes / tensor
    key_value = samples * layers.context.key_value_bytes / tensor
    exchange = _exchange_s(query, key_value, strategies.ulysses)
    causal = layers.context.causal
    ring = _Ring(group=strategies.ring, causal=causal, cluster=cluster, element=precision.bytes, key_value=key_value)
    attention = samples * layers.context.share
    forward = exchange + ring.forward_s(query, attention * layers.forward_s)
    backward = exchange + ring.backward_s(query, attention * layers.backward_s)
    again = strategies.recompute * forward
    total: Floats = (query > 0) * (forward + layers.has_backward * (backward + again))
    return total


def _exchange_s(query: Floats, key_value: Floats, group: GroupLinks) -> Floats:
    """Ulysses: queries, keys and values there, the result back. Backward sends as much the other way."""
    seconds: Floats = 2 * all_to_all_s(query, group) + 2 * all_to_all_s(key_value / 2, group)
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ring:
    """Keys and values on their way round. All R steps are equal, so what is longer in one is so in all."""

    group: GroupLinks
    causal: NDArray[np.bool_]
    cluster: Cluster
    element: int
    key_value: Floats
    """Bytes that a device has of both."""

    def forward_s(self, query: Floats, attention: Floats) -> Floats:
        """All steps but the last pass keys and values on while they compute."""
        steps = self.group.size - 1
        exposed = self._exposed_s(attention, steps * ring_pass_s(self.key_value, self.group))
        total: Floats = np.where(steps > 0, exposed + _MERGED * self._touched_s(query), 0.0)
        return total

    def backward_s(self, query: Floats, attention: Floats) -> Floats:
        """Keys and values go round once more, and their gradients with them. These take one step more to come home,
        beside which nothing is computed."""
        steps = self.group.size - 1
        sums = ring_pass_s(self.key_value * _SUM_BYTES / self.element, self.group)
        exposed = self._exposed_s(attention, steps * (ring_pass_s(self.key_value, self.group) + sums)) + sums
        total: Floats = np.where(steps > 0, exposed + _ADDED * self._touched_s(query + self.key_value), 0.0)
        return total

    def _exposed_s(self, attention: Floats, passes: Floats) -> Floats:
        beside = attention * (self.group.size - 1) / self.group.size
        exposed: Floats = overlapped_s(beside, passes, self.cluster.overlap_slowdown) - beside
        return exposed

    def _touched_s(self, size: Floats) -> Floats:
        """One fp32 cell read or written for each value of so many bytes, in each step. Of causal attention half of the
        steps but the first have half of the queries, and the others half of the keys."""
        steps = np.where(self.causal, (3 * self.group.size + 1) / 4, self.group.size)
        total: Floats = steps * size / self.element * _SUM_BYTES / self.cluster.device.memory_bytes_per_s
        return total
