"""A tied weight that its later user splits otherwise than its owner (docs/cost-model.md, "Tied weights").

In each micro-batch the later user gathers the owner's parts in forward and scatters their gradient in backward; with
recompute it gathers twice. Knows neither stages nor who owns what.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import Precision
from galvatron.planner.cost.arrays import LayerArrays, StrategyArrays
from galvatron.planner.cost.communication import Floats, GroupLinks, all_gather_s, reduce_scatter_s

__all__ = ["Resplit", "resplit_bytes", "resplit_s"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resplit:
    """What later users pay on top of their tables; zero where owner and later user split alike."""

    time_ns: NDArray[np.int64]
    activation_bytes: NDArray[np.int64]
    """Of one micro-batch in flight."""
    transient_bytes: NDArray[np.int64]


def resplit_s(layers: LayerArrays, strategies: StrategyArrays, owner: GroupLinks, precision: Precision) -> Floats:
    """Seconds of a micro-batch, (T, S), under a split that differs from that of the owner's groups."""
    size = precision.bytes * layers.tied_parameters
    seconds: Floats = (1 + strategies.recompute) * all_gather_s(size, owner) + reduce_scatter_s(size, owner)
    return seconds


def resplit_bytes(
    layers: LayerArrays, strategies: StrategyArrays, owner: GroupLinks, precision: Precision, work: Floats
) -> tuple[Floats, Floats]:
    """(saved, transient) bytes, both (T, S), under a split that differs from that of the owner's groups.

    The gathered weight is saved for backward (the user's part is a view of it). In backward, when the gradients of the
    layer's own work ``work`` are gone, the gradient is written into a whole one; that is padded to equal parts and
    scattered where the owner splits the weight.
    """
    whole = precision.bytes * layers.tied_parameters
    tensor = np.where(layers.splits > 0, strategies.tp.size, 1.0)
    gathered = whole * (owner.size > 1)
    gradients = np.where(owner.size > 1, 2 * whole + whole / owner.size, whole + whole / tensor)
    saved: Floats = np.where(strategies.recompute, 0.0, gathered)
    transient: Floats = np.where(strategies.recompute, gathered, 0.0) + np.maximum(gradients - work, 0)
    return saved, transient
