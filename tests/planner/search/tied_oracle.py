"""What borrowing a tied weight costs a layer, one pair of layers at a time: an oracle for the cost model's tables.

An owner's parts are put together over the devices among which it splits the weight, once in forward (and again where
the layer is recomputed), and the gradient is taken apart over the same devices in backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from galvatron.core.spec import Factor, Kind, LayerSpec, Strategy
from galvatron.planner.cost import GALVATRON
from galvatron.planner.search import Problem


@dataclass(frozen=True, slots=True)
class Price:
    """For one micro-batch."""

    ns: int = 0
    saved: int = 0
    transient: int = 0


def sharers(problem: Problem, begin: int, end: int) -> list[int]:
    """Layers between two cuts that use one weight: the model's first layer, and all that are tied to it."""
    layers = problem.cost.model.layers
    if problem.cost.conventions is not GALVATRON or not any(layer.tied_parameters for layer in layers):
        return []
    return [index for index in range(begin, end) if index == 0 or layers[index].tied_parameters]


def split_over(layer: LayerSpec, strategy: Strategy) -> frozenset[Factor]:
    return frozenset() if layer.tensor_parallel is None else strategy.factors(Kind.TP)


def price(problem: Problem, owner: frozenset[Factor], layer: LayerSpec, strategy: Strategy, micro_batch: int) -> Price:
    own = split_over(layer, strategy)
    if own == owner:
        return Price()
    model, link = problem.cost.model, problem.cost.cluster.link(owner)
    weight = model.training.precision.bytes * layer.tied_parameters
    parts, mine = (math.prod(factor.size for factor in factors) for factors in (owner, own))
    seconds = 0.0
    if parts > 1:
        seconds = (3 if strategy.recompute else 2) * (weight * (parts - 1) / parts / link.bytes_per_s + link.latency_s)
    copy = weight if parts > 1 else 0
    gradient = 2 * weight + weight / parts if parts > 1 else weight + weight / mine  # whole, padded, scattered
    over = max(
        gradient - _working(layer, strategy, mine) * micro_batch / strategy.data_degree / strategy.context_degree, 0
    )
    kept, again = (0, copy) if strategy.recompute else (copy, 0)
    return Price(_up(seconds * 1e9), kept, _up(again + over))


def _working(layer: LayerSpec, strategy: Strategy, parts: int) -> float:
    """Bytes of a sample's gradients inside a layer: TP divides them, but not those outside its split parts."""
    if parts == 1 or layer.tensor_parallel is None:
        return layer.transient_bytes
    message = layer.tensor_parallel.message_bytes
    outside = (2 + 3 / parts) * message if strategy.sequence_parallel else min(layer.transient_bytes, 3 * message)
    return max(layer.transient_bytes / parts, outside)


def _up(value: float) -> int:
    return math.ceil(value - 1e-6)
