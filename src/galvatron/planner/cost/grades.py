"""What a layer saves for backward by its grade: all, some results with the rest recomputed, or all of it on the host
(docs/cost-model.md, "Grades of recompute").
"""

from __future__ import annotations

import numpy as np

from galvatron.core.spec import Device
from galvatron.planner.cost.arrays import LayerArrays, StrategyArrays
from galvatron.planner.cost.communication import Floats

__all__ = ["full_activation_bytes", "graded_bytes", "graded_s", "input_bytes", "offload_s"]


def full_activation_bytes(layers: LayerArrays, strategies: StrategyArrays) -> Floats:
    """What one sample saves for backward without recompute, experts that follow the rest of the layer included."""
    split = np.where(layers.splits > 0, strategies.tp.size, 1.0)
    replicas = np.where(strategies.sequence_parallel & (layers.splits > 0), strategies.tp.size, 1.0)
    counted = layers.split_activation_bytes / split + layers.replicated_activation_bytes / replicas
    known = np.where(np.isnan(layers.measured_activation_bytes), counted, layers.measured_activation_bytes)
    logits = strategies.fused_loss * layers.fused.saved_bytes / split
    # Attention over divided sequences keeps its result beside the copy that the next product keeps.
    divided = (strategies.ring.size * strategies.ulysses.size > 1) * layers.context.query_bytes / split
    total: Floats = np.maximum(known - logits, 0) + divided
    return total


def input_bytes(layers: LayerArrays, strategies: StrategyArrays) -> Floats:
    """One sample's input of a layer on a device."""
    sequence = np.where(strategies.sequence_parallel, strategies.tp.size, 1.0)
    size: Floats = layers.input_bytes / sequence
    return size


def graded_bytes(full: Floats, layers: LayerArrays, strategies: StrategyArrays) -> Floats:
    """Of what one sample saves in full, what stays on the device where some results are kept or all is offloaded."""
    total = np.where(strategies.offload, 0.0, full)
    split = np.where(layers.splits > 0, strategies.tp.size, 1.0)
    replicas = np.where(strategies.sequence_parallel & (layers.splits > 0), strategies.tp.size, 1.0)
    for chosen, columns in (
        (strategies.selective_recompute, layers.selective),
        (strategies.recompute_but_attention, layers.but_attention),
    ):
        whole = columns.replicated_bytes + (split > 1) * columns.sent_bytes
        counted = input_bytes(layers, strategies) + columns.split_bytes / split + whole / replicas
        measured = (strategies.tp.size == 1) & ~np.isnan(columns.measured_bytes)
        # What Ulysses exchanged is kept, as results of other collectives are.
        context = layers.context
        exchanged = (strategies.ulysses.size > 1) * (2 * context.query_bytes + context.key_value_bytes) / split
        kept = np.where(measured, columns.measured_bytes, counted) + exchanged
        total = np.where(chosen, np.minimum(kept, full), total)
    return total


def graded_s(samples: Floats, layers: LayerArrays, strategies: StrategyArrays, device: Device) -> Floats:
    """Recomputing all but some results: as measured, else their share of forward's operations.

    What selective recompute does again has hardly any operations. It takes as long as the traffic through memory for
    each byte that is not kept: that of a forward by a roofline, else writing and reading it once.
    """
    seconds = np.zeros((1, 1))
    for chosen, columns in (
        (strategies.selective_recompute, layers.selective),
        (strategies.recompute_but_attention, layers.but_attention),
    ):
        counted = np.isnan(columns.fixed_s)
        fixed = np.where(counted, layers.forward_fixed_s, columns.fixed_s)
        seconds = seconds + chosen * (samples * columns.share * layers.forward_s + fixed)
    full = full_activation_bytes(layers, strategies)
    dropped = samples * (full - graded_bytes(full, layers, strategies))
    moved = strategies.selective_recompute * np.isnan(layers.selective.fixed_s)
    total: Floats = layers.has_backward * (
        seconds + moved * layers.selective.traffic * dropped / device.memory_bytes_per_s
    )
    return total


def offload_s(
    samples: Floats, layers: LayerArrays, strategies: StrategyArrays, device: Device, beside: tuple[Floats, Floats]
) -> Floats:
    """What copies to the host and back take longer than the forward and the backward ``beside`` which they run, and
    what they take from these of the device's memory traffic."""
    if device.host_bytes_per_s is None or not strategies.offload.any():
        return np.zeros((1, 1))
    copy = strategies.offload * layers.has_backward * samples * full_activation_bytes(layers, strategies)
    waiting = [np.maximum(copy / device.host_bytes_per_s - computing, 0.0) for computing in beside]
    total: Floats = strategies.offload * (waiting[0] + waiting[1] + 2 * copy / device.memory_bytes_per_s)
    return total
