"""What costs are added up in: seconds by what they are spent on, and the integer tables of the search.

Times are whole nanoseconds and memory whole bytes, rounded up, so that sums are exact in any order and plans are
identical from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from galvatron.planner.cost.communication import Floats

__all__ = ["NEVER", "Distinct", "Integers", "LayerCosts", "Tables", "held_bytes", "rounded_up"]

Integers = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)
NEVER = 1 << 44
"""Nanoseconds (4.9 hours) or bytes (16 TiB) of what cannot be done; sums of thousands still fit an int64. More than
that is not told apart: no device has so much memory, and of plans in which a stage takes longer for a micro-batch
nothing is proven (``galvatron.planner.search.outer``)."""


class Distinct:
    """Figures of many combinations, most of them several times: what only they decide is computed once for each."""

    def __init__(self, figures: Integers) -> None:
        self.figures, places = np.unique(figures, return_inverse=True)
        """(N,)"""
        self._places = places.reshape(figures.shape)

    def each(self, table: NDArray[Number]) -> NDArray[Number]:
        """A table by figure, (N, T, S), for each combination; what is the same for all of them is left as it is."""
        return table if table.ndim < 3 else table[self._places]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Where the time of one micro-batch goes, each (…, T, S) in seconds; communication is what stays exposed."""

    compute_s: Floats
    tp_s: Floats
    ep_s: Floats
    """Tokens on their way to experts with axes of their own, and back."""
    cp_s: Floats
    """Attention over divided sequences: heads exchanged for tokens, keys and values on their way round."""
    sdp_s: Floats
    sync_s: Floats
    """Once an iteration: gradient synchronisation of DP and of tied weights, gathering of ZeRO-2."""
    optimizer_s: Floats
    """Once an iteration."""

    @property
    def steady_s(self) -> Floats:
        return self.compute_s + self.tp_s + self.sdp_s + self.ep_s + self.cp_s

    @property
    def once_s(self) -> Floats:
        return self.sync_s + self.optimizer_s

    def mean_ns(self, sizes: Distinct, micro_batches: Integers) -> Integers:
        """Mean time of a micro-batch, with its share of what is done once an iteration; of these costs, those by
        ``sizes``."""
        return rounded_up((sizes.each(self.steady_s) + sizes.each(self.once_s) / micro_batches) * 1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Costs of each kind of layer under each strategy, (…, T, S)."""

    time_ns: Integers
    """Mean time of a micro-batch, its share of once-an-iteration work included; NEVER where not allowed."""
    state_bytes: Integers
    activation_bytes: Integers
    """Of one micro-batch in flight."""
    transient_bytes: Integers


def rounded_up(values: Floats) -> Integers:
    """Round up, to at most NEVER, forgiving the last bits of floating point so that 3.0000000001 bytes are 3."""
    return np.minimum(np.ceil(values - 1e-6), NEVER).astype(np.int64)


def held_bytes(state: Integers, activations: Integers, in_flight: Integers | int) -> Integers:
    """Memory with so many micro-batches in flight. What is beyond NEVER need not be told apart, and would leave an
    int64's range."""
    count: Integers = np.asarray(in_flight, dtype=np.int64)
    most: Integers = np.floor_divide(NEVER, count) + 1
    held: Integers = np.minimum(activations, most)
    held = held * count
    return state + held
