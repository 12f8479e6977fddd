"""Time of computation (docs/cost-model.md, "Computation").

Paper Section 3.4: samples times the profiled time of one sample, backward twice forward, both divided by TP; beyond
the paper a fixed overhead a layer and micro-batch, the time that starting kernels takes at least, recompute, and the
optimizer step.
"""

from __future__ import annotations

import numpy as np

from galvatron.core.spec import LOSS_CHUNK_CELLS, Device, OptimizerSpec
from galvatron.planner.cost.arrays import LayerArrays, StrategyArrays
from galvatron.planner.cost.communication import Floats

__all__ = [
    "backward_s",
    "following_experts",
    "forward_s",
    "local_parameters",
    "optimizer_s",
    "shared_parameters",
    "step_s",
    "trained_parameters",
]


def forward_s(samples: Floats, layers: LayerArrays) -> Floats:
    """Forward of this many samples on each device."""
    seconds: Floats = np.maximum(samples * layers.forward_s + layers.forward_fixed_s, layers.forward_least_s)
    return seconds


def backward_s(samples: Floats, layers: LayerArrays, strategies: StrategyArrays) -> Floats:
    """Backward of this many samples, with the second forward where the layer is recomputed, and what a fused loss takes
    besides: each chunk adds to the weight's gradient."""
    seconds: Floats = np.maximum(samples * layers.backward_s + layers.backward_fixed_s, layers.backward_least_s)
    chunks = np.ceil(samples * layers.fused.logits / strategies.tp.size / LOSS_CHUNK_CELLS)
    fused = strategies.fused_loss * chunks * layers.fused.chunk_s / strategies.tp.size
    again = strategies.recompute * layers.has_backward
    return seconds + fused + again * (forward_s(samples, layers) + layers.recompute_s)


def local_parameters(layers: LayerArrays, strategies: StrategyArrays, *, tied_here: bool) -> Floats:
    """Parameters of a layer on one device before SDP or ZeRO-2 shards them, experts with axes of their own left out.

    ``tied_here``: the stage also holds the layer that tied weights belong to, so that they are counted there.
    """
    split = layers.split_parameters - (layers.tied_parameters if tied_here else 0)
    parameters: Floats = split / strategies.tp.size + layers.replicated_parameters
    return parameters - strategies.own * following_experts(layers, strategies)


def trained_parameters(layers: LayerArrays, strategies: StrategyArrays, *, tied_here: bool) -> Floats:
    """Of those, the ones that are not frozen."""
    split = layers.frozen_split_parameters - (layers.frozen_tied_parameters if tied_here else 0)
    frozen = split / strategies.tp.size + layers.frozen_replicated_parameters
    apart = strategies.own * (1 - layers.experts.trained) * following_experts(layers, strategies)
    trained: Floats = local_parameters(layers, strategies, tied_here=tied_here) - (frozen - apart)
    return trained


def following_experts(layers: LayerArrays, strategies: StrategyArrays) -> Floats:
    """Of those, the ones of experts that follow the rest of the layer."""
    parameters: Floats = layers.experts.parameters / np.where(layers.splits > 0, strategies.tp.size, 1.0)
    return parameters


def shared_parameters(layers: LayerArrays, strategies: StrategyArrays, *, tied_here: bool) -> Floats:
    """Of those, the ones that later layers of the stage are tied to."""
    shared: Floats = layers.shared_parameters * tied_here / np.where(layers.splits > 0, strategies.tp.size, 1.0)
    return shared


def optimizer_s(parameters: Floats, strategies: StrategyArrays, device: Device, optimizer: OptimizerSpec) -> Floats:
    """One optimizer step over the parameters a device owns; memory-bound."""
    owners = strategies.sdp.size * np.where(strategies.zero2, strategies.dp.size, 1.0)
    return step_s(parameters / owners, device, optimizer)


def step_s(parameters: Floats, device: Device, optimizer: OptimizerSpec) -> Floats:
    """One optimizer step over so many parameters."""
    seconds: Floats = parameters * optimizer.traffic_bytes / device.memory_bytes_per_s
    return seconds
