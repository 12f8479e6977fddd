"""Times and sizes of one kind of layer under one variant: as a profile measured them, else counted."""

from __future__ import annotations

import numpy as np

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Cluster, LayerSpec, ModelProfile, ModelSpec
from galvatron.core.spec.float8 import Float8
from galvatron.core.spec.tuning import Tuning, stock_kind
from galvatron.planner.cost.roofline import least_times, roofline_times

__all__ = ["Variant", "measured_times"]

Variant = tuple[int, bool, bool, bool, bool, bool]
"""Degree of TP, sequence parallelism, whether states are sharded, whether experts have axes of their own, whether the
loss is fused."""


def measured_times(
    kind: LayerSpec, variant: Variant, model: ModelSpec, cluster: Cluster, profile: ModelProfile | None
) -> tuple[float, ...]:
    """Times of one layer under one degree of TP, with sequence parallelism and sharding or without, and measured sizes.

    Where the profile knows a smaller degree only, what one sample takes is divided further. Experts with axes of their
    own make a layer as fast as at the best degree of EP that was measured; others add to it (``experts.py``).
    """
    tp, sequence_parallel, sharded, own, fused, float8 = variant
    overhead_s = cluster.device.layer_overhead_s
    tuning, name = kind.tuning or Tuning(), stock_kind(kind.name) if kind.tuning else kind.name
    time = profile.time_of(name, tp, sequence_parallel=sequence_parallel, fused_loss=fused) if profile else None
    memory = profile.memory_of(name, tp, sequence_parallel=sequence_parallel) if profile else None
    training = model.training
    roofline = None if time else cluster.device.roofline(training.precision, compiled=training.compile)
    if time:
        forward_s, ratio = time.forward_s, time.backward_ratio
    elif roofline:
        forward_s, back_s = roofline_times(kind, roofline, training, tp=tp, sequence_parallel=sequence_parallel)
        ratio = back_s / forward_s if forward_s else 2.0
    else:
        forward_s, ratio = kind.forward_flops / cluster.device.flops_per_s(model.training.precision), 2.0
    apart = profile.expert_times(name) if profile and own else {}
    whole = profile.time_of(name) if profile else None
    if apart and whole:
        backward_s = min(each.forward_s * each.backward_ratio for each in apart.values())
        scale = min(each.forward_s for each in apart.values()) / whole.forward_s
        ratio *= backward_s / (whole.forward_s * whole.backward_ratio) / scale
        forward_s *= scale
    if kind.tensor_parallel is not None and not roofline:
        forward_s *= _work_left(kind, tp) / _work_left(kind, time.tp if time else 1)
    fixed = (time.forward_fixed_s, time.backward_fixed_s) if time else (None, None)
    least = (time.forward_least_s, time.backward_least_s) if time else (0.0, 0.0)
    if roofline:
        fixed, least = (0.0, 0.0), least_times(kind, cluster.device, training, tp=tp, own_experts=own)
    more = (time.forward_sharded_s, time.backward_sharded_s) if time and sharded else (0.0, 0.0)
    if time and tuning.adapter_flops:  # it was measured without them
        forward_s *= kind.forward_flops / (kind.forward_flops - tuning.adapter_flops)
    # Half of backward is for the input's gradient, half for those of the weights.
    ratio *= tuning.backward * (1 - 0.5 * tuning.frozen_parameters / max(kind.parameters, 1))
    backward_s, weights_s = forward_s * ratio, 0.0
    if float8 and kind.float8 is not None:
        forward_s, backward_s, weights_s = _in_float8(kind.float8, (forward_s, backward_s), model, cluster)
    return (
        forward_s,
        backward_s,
        (overhead_s if fixed[0] is None else fixed[0]) + more[0] + weights_s,
        tuning.backward * ((2 * overhead_s if fixed[1] is None else fixed[1]) + more[1] + weights_s),
        least[0] + more[0],
        tuning.backward * (least[1] + more[1]),
        tuning.backward * time.recompute_s if time else 0.0,
        memory.activation_bytes if memory else np.nan,
        memory.transient_bytes if memory else np.nan,
    )


def _in_float8(
    part: Float8, passes: tuple[float, float], model: ModelSpec, cluster: Cluster
) -> tuple[float, float, float]:
    """Forward and backward of a sample, and casting the weights once, where products are in float8: these take less and
    casting is added. No pass gets faster than if all of it were such products."""
    device, precision = cluster.device, model.training.precision
    narrow, wide = device.float8_flops_per_s, device.products_flops_per_s(precision)
    if narrow is None:
        raise InvalidInput(f"device {device.name!r} has no float8 that is known; leave +f8 out")
    casts = [size / device.memory_bytes_per_s for size in part.cast_bytes(precision.bytes)]
    saved_s = part.forward_flops / wide - part.forward_flops / narrow
    forward_s = max(passes[0] - saved_s, passes[0] * wide / narrow) + casts[0]
    backward_s = max(passes[1] - 2 * saved_s, passes[1] * wide / narrow) + casts[1]
    return forward_s, backward_s, casts[2]


def _work_left(kind: LayerSpec, tp: int) -> float:
    """The share of a layer's work that one of so many tensor-parallel ranks does."""
    if not kind.replicated_flops:
        return 1 / tp
    whole = kind.replicated_flops / kind.forward_flops
    return whole + (1 - whole) / tp
