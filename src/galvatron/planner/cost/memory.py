"""Memory of a layer on one device (docs/cost-model.md, "Memory"; paper Section 3.4: "shape of a tensor and its type").

A stage's peak is the sum over its layers of states and saved activations, plus the largest transient of any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from galvatron.core.spec import ALIGNED_BYTES, GRADIENT_BYTES, LOSS_CHUNK_CELLS, OptimizerSpec, Precision
from galvatron.planner.cost.arrays import Bools, Integers, LayerArrays, StrategyArrays
from galvatron.planner.cost.communication import Floats
from galvatron.planner.cost.computation import following_experts
from galvatron.planner.cost.conventions import Conventions
from galvatron.planner.cost.grades import full_activation_bytes, graded_bytes, input_bytes

__all__ = [
    "EARLY_GRADIENT",
    "Weights",
    "activation_bytes",
    "following_expert_bytes",
    "forward_bytes",
    "late_gradient_bytes",
    "shared_bytes",
    "state_bytes",
    "transient_bytes",
    "working_bytes",
]

EARLY_GRADIENT = 1 / 3
"""Share of a layer's gradient that is there when its activations peak in backward: that of its last projection, 4h² of
a block's 12h² parameters, or one of an expert's three."""


FORWARD_ALIVE = 3 / 4
"""Share of what a block would save for backward that is alive at once in a forward without one: a gated feed-forward's
three wide tensors and two of the boundary."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of each kind of layer under each strategy on one device, before data parallelism shards them."""

    held: Floats
    shared: Floats
    """Those of them that later layers of the stage use."""
    trained: Floats
    """Those of them that are not frozen, shared ones included."""


def state_bytes(
    weights: Weights,
    strategies: StrategyArrays,
    precision: Precision,
    optimizer: OptimizerSpec,
    conventions: Conventions,
) -> Floats:
    """Parameters, gradients and optimizer states, as DP replicates, SDP and ZeRO-2 shard them.

    In bf16 a working copy stays beside the fp32 master unless SDP gathers it when needed; ZeRO-2 keeps a whole working
    copy in either precision. Of what is frozen there is the working parameter alone. A distributed optimizer keeps
    gradients whole too.
    """
    shards = strategies.sdp.size * np.where(strategies.zero2, strategies.dp.size, 1.0)
    keeps_copy = strategies.zero2 | ((strategies.sdp.size == 1) & (precision is Precision.BF16))
    total: Floats = weights.trained * (optimizer.bytes_per_parameter / shards + keeps_copy * precision.bytes)
    if conventions.distributed_optimizer:
        total = total + weights.trained * strategies.zero2 * GRADIENT_BYTES * (1 - 1 / shards)
    frozen = weights.held - weights.trained
    return total + frozen * precision.bytes * (1 / shards + strategies.zero2)


def late_gradient_bytes(
    saved: Floats, weights: Weights, alone: Bools, layers: LayerArrays, strategies: StrategyArrays,
    precision: Precision,
) -> tuple[Floats, Floats]:  # fmt: skip
    """What states have too much where all forwards come before the first backward, and what of it a transient has
    instead.

    A gradient is then made when a micro-batch's activations of the layer, of which there are ``saved`` bytes, are gone:
    a shard's when it is reduced, a whole one when backward has it, but for DP in fp32, which has the buffer that it
    sends from the start. ``alone``: the first layer, of the only micro-batch. Its gradient comes when nothing else is
    left, so it counts only while that layer runs backward; a weight that a later layer uses as well waits for it with
    that one's part.
    """
    shards = strategies.sdp.size * np.where(strategies.zero2, strategies.dp.size, 1.0)
    late = (shards > 1) | (strategies.dp.size == 1) | (precision is Precision.BF16)
    gradient = GRADIENT_BYTES * weights.trained / shards
    waiting = np.where(shards > 1, 0, np.minimum(weights.shared, weights.trained) * precision.bytes)
    first = late * np.maximum(gradient - waiting, 0)
    instead = late * np.minimum(gradient, saved)
    # Of the layer that runs: DP has its whole buffer from the first gradient on, others one gradient after the other.
    early = np.where(shards > 1, 0.0, np.where(strategies.dp.size > 1, 1.0, EARLY_GRADIENT)) * instead
    return np.where(alone, first, instead), np.where(alone, first, early)


def shared_bytes(shared: Floats, strategies: StrategyArrays, precision: Precision, conventions: Conventions) -> Floats:
    """Parameters that a layer shares with later ones of its stage (a tied head) stay gathered under SDP, from the first
    use to the last. (ZeRO-2 keeps them gathered anyway.)"""
    stays = (strategies.sdp.size > 1) & conventions.shared_stay_gathered
    total: Floats = stays * precision.bytes * shared
    return total


def activation_bytes(samples: Floats, layers: LayerArrays, strategies: StrategyArrays) -> Floats:
    """Saved for backward by one micro-batch: all of it, or only the layer's input where it is recomputed, some results
    where these are kept, nothing where it is offloaded; without what experts with axes of their own save."""
    full = full_activation_bytes(layers, strategies)
    apart = strategies.own * np.minimum(full, following_expert_bytes(layers, strategies))
    kept = graded_bytes(full, layers, strategies) - apart
    kept = np.where(strategies.recompute, input_bytes(layers, strategies), kept)
    saved: Floats = samples * kept + strategies.fused_loss * layers.fused.gradient_bytes / strategies.tp.size
    total: Floats = layers.has_backward * saved
    return total


def transient_bytes(
    samples: Floats,
    weights: Weights,
    layers: LayerArrays,
    strategies: StrategyArrays,
    precision: Precision,
    conventions: Conventions,
) -> Floats:
    """Alive only while the layer runs backward: gradients inside it, what recompute restored, and under SDP the
    gathered parameters and whole gradients (under ZeRO-2 the gradient).

    Beside the layer's own parameters those of the layer before it are gathered, which is next in backward (no more
    than its own are counted, for that one may not be sharded). FSDP2 lets go of the buffer a layer's gradient is
    reduced from when the next one reduces its own: there is such a buffer of the layer after it, whose activations are
    gone. And there is the layer's own gradient: a part of it while activations are many, all of it when they are gone;
    under ZeRO-2 the larger of the two counts. Shared weights have their copy already, and nothing is prefetched behind
    them. Experts with axes of their own count the work of the layer, and take the places that it frees.
    """
    parameters = weights.held
    full = full_activation_bytes(layers, strategies)
    restored = np.where(strategies.recompute, full, full - graded_bytes(full, layers, strategies))
    # While an offloaded layer goes backward, what the one before it saved comes back.
    restored = layers.has_backward * restored * np.where(strategies.offload, 2, 1)
    whole_loss = samples * (working_bytes(layers, strategies, conventions) + restored) * ~strategies.own
    work = np.where(strategies.fused_loss, _chunk_bytes(samples, layers, strategies, precision), whole_loss)
    sharded = strategies.sdp.size > 1
    gathers = sharded & conventions.sdp_buffers_in_backward
    shared = np.where(gathers & conventions.shared_stay_gathered, weights.shared, 0)
    share = weights.trained / np.maximum(parameters, 1)  # of what has a gradient
    whole = share * (parameters - shared) * precision.bytes
    growing = np.maximum(whole * EARLY_GRADIENT, whole - work)
    own = np.where(gathers, growing, 0) + share * shared * precision.bytes
    outside = parameters - ~strategies.own * following_experts(layers, strategies)
    ahead = np.where(shared > 0, 0, np.minimum(_beside(parameters, outside, layers.before), parameters))
    gathered = gathers * precision.bytes * (parameters - shared + conventions.layers_prefetched * ahead)
    freed = np.where(gathers & ~strategies.own, activation_bytes(samples, layers, strategies), 0)
    gradients = GRADIENT_BYTES * _beside(share * parameters, share * outside, layers.after)
    buffer = gradients - _beside(freed, freed, layers.after)
    scatters = strategies.zero2 & (not conventions.distributed_optimizer)
    reduced = np.where(gathers, np.maximum(buffer, 0), np.where(scatters, np.maximum(buffer, growing), 0))
    kept = sharded * conventions.largest_layers_kept * parameters.max(axis=-2, keepdims=True)
    total: Floats = work + gathered + own + reduced + kept * precision.bytes
    return total


def forward_bytes(samples: Floats, layers: LayerArrays, strategies: StrategyArrays) -> Floats:
    """Alive only while a layer without backward runs, which matters in a stage that has no others."""
    total: Floats = (1 - layers.has_backward) * samples * FORWARD_ALIVE * full_activation_bytes(layers, strategies)
    return total


def _chunk_bytes(samples: Floats, layers: LayerArrays, strategies: StrategyArrays, precision: Precision) -> Floats:
    """While a fused loss is computed: the weight's gradient in fp32, and a chunk's logits; beside these, if compiled,
    their gradient; if not, the same in fp32, whose place the gradient takes, and, but under TP, its powers.

    What stays of the weight's gradient (:func:`activation_bytes`) is the same tensor, or one in bf16 that is made when
    the chunks are gone. Where rows of logits are not aligned, there is a copy of the weight that is filled up.
    """
    logits = np.minimum(samples * layers.fused.logits / strategies.tp.size, LOSS_CHUNK_CELLS)
    whole = strategies.tp.size == 1
    wide = Precision.FP32.bytes
    uncompiled = (precision.bytes < wide) * wide + whole * wide
    cell = precision.bytes + np.where(layers.fused.compiled & whole, precision.bytes, uncompiled)
    gradient = GRADIENT_BYTES * layers.fused.parameters / strategies.tp.size
    stays = layers.fused.gradient_bytes / strategies.tp.size
    odd = layers.fused.words / strategies.tp.size * precision.bytes % ALIGNED_BYTES != 0
    chunk = logits * cell + odd * stays  # as large as the weight is
    total: Floats = np.maximum(chunk + gradient - stays, np.where(stays < gradient, gradient, 0))
    return total


def _beside(values: Floats, outside: Floats, neighbours: Integers) -> Floats:
    """What the neighbours of each kind have of this, under the same strategy.

    Of another kind that has experts only what is ``outside`` them counts: those may have axes of their own there, and
    where they follow, that layer itself needs more than this one.
    """
    alike = neighbours == np.arange(len(neighbours))
    there = np.where(alike[:, None], values, outside[..., neighbours, :])
    beside: Floats = np.where(neighbours[:, None] >= 0, there, 0)
    return beside


def working_bytes(layers: LayerArrays, strategies: StrategyArrays, conventions: Conventions) -> Floats:
    """Gradients inside a layer's backward, for one sample: as measured, else by count.

    Tensor parallelism divides them, but not those outside its split parts: a norm's backward holds up to three whole
    boundary tensors, and gathering along the sequence two beside the parts.
    """
    split = np.where(layers.splits > 0, strategies.tp.size, 1.0)
    divided: Floats = layers.transient_bytes / split
    if not conventions.whole_tensors_in_tp:
        return divided
    message = layers.tp_message_bytes
    outside = np.minimum(layers.transient_bytes, 3 * message)
    whole = np.where(strategies.sequence_parallel, (2 + 3 / strategies.tp.size) * message, outside)
    counted = np.where(split > 1, np.maximum(divided, whole), layers.transient_bytes)
    return np.where(np.isnan(layers.measured_transient_bytes), counted, layers.measured_transient_bytes)


def following_expert_bytes(layers: LayerArrays, strategies: StrategyArrays) -> Floats:
    """Of these, what tokens save for their experts."""
    split = np.where(layers.splits > 0, strategies.tp.size, 1.0)
    replicas = np.where(strategies.sequence_parallel & (layers.splits > 0), strategies.tp.size, 1.0)
    columns = layers.experts
    total: Floats = columns.activation_bytes / split + columns.replicated_activation_bytes / replicas
    return total
