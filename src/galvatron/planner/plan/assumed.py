"""The rates of computation that a plan's prices assume, to be compared with what people reach."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron.core.spec import Kind, Strategy
from galvatron.core.spec.tuning import stock_kind
from galvatron.planner.cost.arrays import layer_arrays
from galvatron.planner.plan.plan import Plan

__all__ = ["AssumedRate", "assumed_rates"]

_BACKWARD = 2
"""Operations of backward over those of forward, as people count a share of peak (MFU)."""


@dataclass(frozen=True, slots=True)
class AssumedRate:
    """How fast one kind of layer computes on a device, under one strategy of the plan."""

    layer: str
    strategy: str
    flops_per_s: float
    """Of forward and backward of the rank's part, without recompute, overheads and communication."""
    share: float | None
    """Of the data sheet's rate; None: that is not known."""
    basis: str
    """What the rate follows from."""


def assumed_rates(plan: Plan) -> tuple[AssumedRate, ...]:
    """One for each kind of layer with work to do and strategy of the plan; none where some parameters are frozen, since
    their backward has other operations."""
    model, cluster = plan.model.spec(), plan.cluster.facts
    if model.training.tunes:
        return ()
    used = dict.fromkeys((layer.layer, layer.strategy) for stage in plan.stages for layer in stage.layers)
    strategies = [Strategy.parse(strategy) for _, strategy in used]
    times = layer_arrays(model, cluster, plan.profile, strategies)
    rows = {kind.name: row for row, kind in enumerate(model.kinds)}
    roofline = cluster.device.roofline(model.training.precision, compiled=model.training.compile)
    peak = cluster.device.peak_flops_per_s(model.training.precision)
    found = []
    for column, ((name, text), strategy) in enumerate(zip(used, strategies, strict=True)):
        kind = model.kinds[rows[name]]
        split = 1 if kind.tensor_parallel is None else strategy.degree(Kind.TP)
        flops = kind.replicated_flops + (kind.forward_flops - kind.replicated_flops) / split
        seconds = times.forward_s[rows[name], column] + times.backward_s[rows[name], column]
        if not flops or not seconds:
            continue
        measured = plan.profile is not None and plan.profile.time_of(stock_kind(name)) is not None
        basis = "measured" if measured else "roofline of the device" if roofline else "one rate of the device"
        rate = float((1 + _BACKWARD) * flops / seconds)
        found.append(AssumedRate(name, text, rate, None if peak is None else rate / peak, basis))
    return tuple(found)
