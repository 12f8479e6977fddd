"""Slice-Gather: what it costs to change the layout of the activations between neighbouring layers (paper Section 4).

From rows laid out as A to B, slicing is free and one all-gather spans the factors in A∖B; backward runs the other way,
from B to A, so a change that is free in forward is paid in backward. Beyond the paper, sequences divided by sequence
parallelism are gathered before and sliced after (docs/cost-model.md, "Slice-Gather").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import Cluster, Factors, Layout, degree_of, lines_up, sequence_change
from galvatron.planner.cost.communication import Floats

__all__ = ["LayoutRates", "layout_rates"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRates:
    """What changing the layout costs, forward and backward together: (K, K), from row to column."""

    per_byte: Floats
    """Seconds a byte of the whole micro-batch's boundary tensor."""
    fixed_s: Floats
    whole_per_byte: Floats
    """The same where the source is gathered whole."""
    whole_fixed_s: Floats
    rows: NDArray[np.int64]
    """Rows of a micro-batch that this does not divide are too few to go factor by factor."""

    def change_s(self, micro_batch: int, batch_bytes: Floats) -> Floats:
        """Time to change layout between two layers, for whole-micro-batch boundary tensors of these sizes."""
        enough = micro_batch % self.rows == 0
        seconds: Floats = batch_bytes * np.where(enough, self.per_byte, self.whole_per_byte)
        return seconds + np.where(enough, self.fixed_s, self.whole_fixed_s)


def layout_rates(
    layouts: Sequence[Layout], cluster: Cluster, *, always_factor_by_factor: bool = False, back: bool = True
) -> LayoutRates:
    """Rates of all pairs of layouts. ``always_factor_by_factor``: as if rows were never too few; ``back``: gradients
    take the way back."""
    count = len(layouts)
    rows = np.ones((count, count), dtype=np.int64)
    known: _Known = {}
    per_byte, fixed, whole_per_byte, whole_fixed = (np.zeros((count, count)) for _ in range(4))
    for i, source in enumerate(layouts):
        for j, target in enumerate(layouts):
            nested = source.rows <= target.rows or target.rows <= source.rows  # as both divide the rows, so does this
            lined_up = nested or lines_up(source.rows, target.rows)
            per_byte[i, j], fixed[i, j] = _gathers_s(source, target, cluster, known, whole=not lined_up)
            if lined_up and not nested and not always_factor_by_factor:
                rows[i, j] = degree_of(source.rows | target.rows)
                whole_per_byte[i, j], whole_fixed[i, j] = _gathers_s(source, target, cluster, known, whole=True)
    return LayoutRates(
        per_byte=per_byte + back * per_byte.T,
        fixed_s=fixed + back * fixed.T,
        whole_per_byte=whole_per_byte + back * whole_per_byte.T,
        whole_fixed_s=whole_fixed + back * whole_fixed.T,
        rows=rows,
    )


_Known = dict[tuple[Factors, int], tuple[float, float]]
"""What an all-gather over some factors that leaves so many parts takes: seconds a byte, and fixed ones."""


def _gathers_s(source: Layout, target: Layout, cluster: Cluster, known: _Known, *, whole: bool) -> tuple[float, float]:
    """Seconds a byte and fixed seconds of one direction. A ring of g moves (g−1)/g of what a rank holds afterwards."""
    per_byte, fixed_s = 0.0, 0.0
    for key in _gathers(source, target, whole=whole):
        if key not in known:
            factors, parts = key
            group, link = degree_of(factors), cluster.link(factors)
            known[key] = (group - 1) / group / parts / link.bytes_per_s, link.latency_s
        per_byte += known[key][0]
        fixed_s += known[key][1]
    return per_byte, fixed_s


def _gathers(source: Layout, target: Layout, *, whole: bool) -> Iterator[tuple[Factors, int]]:
    """The all-gathers of one direction: the factors each spans, and the parts of the boundary tensor it leaves.

    Slicing first leaves 1/|A∪B| of the rows on each rank, gathering g = |A∖B| such pieces 1/|B|; a source that is
    gathered whole leaves all of them. What both layouts do alike to sequences stays (:func:`sequence_change`).
    """
    change = sequence_change(source, target)
    kept = degree_of(change.kept)
    if change.gathered:
        yield frozenset(change.gathered), degree_of(source.rows) * kept
    factors, parts = (source.rows, 1) if whole else (source.rows - target.rows, degree_of(target.rows))
    if factors:
        yield factors, parts * kept
