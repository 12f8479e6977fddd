"""Times of layers that nobody measured, on devices that are known by a roofline: products, fused attention and memory
traffic apart (docs/cost-model.md, "Layers without a profile").

A layer's share of peak then follows from its size. Wide products have many operations for each byte that the layer
moves; narrow ones, and what tensor parallelism leaves whole on each rank, have few.
"""

from __future__ import annotations

from galvatron.core.spec import Attention, Device, LayerSpec, Roofline, Training

__all__ = ["attention_flops", "least_times", "roofline_times"]

_ATTENTION_BACKWARD = 2.5
"""Backward of a fused attention kernel over its forward: five products for two, since scores are computed again."""


def roofline_times(
    kind: LayerSpec, roofline: Roofline, training: Training, *, tp: int = 1, sequence_parallel: bool = False
) -> tuple[float, float]:
    """Forward and backward of one sample on one of so many tensor-parallel ranks."""
    split = 1 if kind.tensor_parallel is None else tp
    attended, whole = attention_flops(kind, training), kind.replicated_flops
    rest = kind.forward_flops - attended - whole
    saved = kind.split_activation_bytes / split + kind.replicated_activation_bytes / (split if sequence_parallel else 1)
    products_s = (whole + rest / split) / roofline.products_flops_per_s
    attention_s = attended / split / roofline.attention_flops_per_s
    traffic_s = roofline.traffic * saved / roofline.memory_bytes_per_s
    return (
        products_s + attention_s + traffic_s,
        2 * (products_s + traffic_s) + _ATTENTION_BACKWARD * attention_s,
    )


def least_times(
    kind: LayerSpec, device: Device, training: Training, *, tp: int = 1, own_experts: bool = False
) -> tuple[float, float]:
    """What forward and backward take however few the samples: launching the kernels, which runs ahead of the device, or
    reading the weights of products once, and in backward writing their gradients too.

    ``own_experts``: experts have axes of their own; how many of them a rank has is not known here: they do not count.
    """
    split = 1 if kind.tensor_parallel is None else tp
    apart = kind.experts.parameters if kind.experts and own_experts else 0
    weights = kind.replicated_parameters + (kind.parameters - kind.replicated_parameters - apart) / split
    read_s = weights * training.precision.bytes / device.memory_bytes_per_s if kind.forward_flops else 0.0
    return max(device.layer_overhead_s, read_s), 2 * max(device.layer_overhead_s, read_s)


def attention_flops(kind: LayerSpec, training: Training) -> int:
    """Of a layer's operations in forward, those of fused attention: what its weights do not account for, each of which
    meets every token once (those of experts the tokens that chose them).

    Zero where samples have no length, and where attention is not fused: then its products are like others, and its maps
    are among what the layer saves.
    """
    if training.attention is not Attention.FUSED or training.sequence_length is None:
        return 0
    experts = kind.experts
    weights = kind.parameters - (experts.parameters if experts else 0)
    linear = 2 * training.sequence_length * weights + (experts.forward_flops if experts else 0)
    return max(kind.forward_flops - kind.replicated_flops - linear, 0)
