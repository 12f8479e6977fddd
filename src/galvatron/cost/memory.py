"""Memory of a layer on one device (docs/cost-model.md, "Memory"; paper Section 3.4: "shape of a tensor and its type").

A stage's peak is the sum over its layers of states and saved activations, plus the largest transient of any of them.
"""

from __future__ import annotations

import numpy as np

from galvatron.cost.arrays import LayerArrays, StrategyArrays
from galvatron.cost.communication import Floats
from galvatron.cost.conventions import Conventions
from galvatron.spec import Precision

__all__ = ["GRADIENT_BYTES", "STATE_BYTES", "activation_bytes", "state_bytes", "transient_bytes"]

STATE_BYTES = 16
"""Of one parameter with Adam: fp32 value, gradient and two moments."""
GRADIENT_BYTES = 4
"""Gradients are reduced in fp32, whatever the working precision."""


def state_bytes(parameters: Floats, strategies: StrategyArrays, precision: Precision) -> Floats:
    """Parameters, gradients and optimizer states, as DP replicates, SDP and ZeRO-2 shard them.

    ``parameters``: what a device holds before sharding. In bf16 a working copy stays beside the fp32 master unless SDP
    gathers it when needed; ZeRO-2 keeps a whole working copy in either precision.
    """
    shards = strategies.sdp.size * np.where(strategies.zero2, strategies.dp.size, 1.0)
    keeps_copy = strategies.zero2 | ((strategies.sdp.size == 1) & (precision is Precision.BF16))
    total: Floats = parameters * (STATE_BYTES / shards + keeps_copy * precision.bytes)
    return total


def activation_bytes(samples: Floats, layers: LayerArrays, strategies: StrategyArrays) -> Floats:
    """Saved for backward by one micro-batch: all of it, or only the layer's input where it is recomputed."""
    sequence = np.where(strategies.sequence_parallel, strategies.tp.size, 1.0)
    kept = np.where(strategies.recompute, layers.input_bytes / sequence, _full_activation_bytes(layers, strategies))
    total: Floats = samples * kept
    return total


def transient_bytes(
    samples: Floats,
    parameters: Floats,
    layers: LayerArrays,
    strategies: StrategyArrays,
    precision: Precision,
    conventions: Conventions,
) -> Floats:
    """Alive only while the layer runs backward: gradients inside it, what recompute restored, and under SDP the
    gathered parameters and their whole gradient (under ZeRO-2 the gradient)."""
    split = np.where(layers.splits > 0, strategies.tp.size, 1.0)
    work = layers.transient_bytes / split + strategies.recompute * _full_activation_bytes(layers, strategies)
    sharded = strategies.sdp.size > 1
    copies = sharded * conventions.gathered_copies * precision.bytes
    gradient = ((copies > 0) | strategies.zero2) * GRADIENT_BYTES
    kept = sharded * conventions.largest_layers_kept * parameters.max(axis=-2, keepdims=True)
    total: Floats = samples * work + parameters * (copies + gradient) + kept * precision.bytes
    return total


def _full_activation_bytes(layers: LayerArrays, strategies: StrategyArrays) -> Floats:
    split = np.where(layers.splits > 0, strategies.tp.size, 1.0)
    replicas = np.where(strategies.sequence_parallel & (layers.splits > 0), strategies.tp.size, 1.0)
    total: Floats = layers.split_activation_bytes / split + layers.replicated_activation_bytes / replicas
    return total
