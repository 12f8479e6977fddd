"""Slice-Gather: what it costs to change the layout of the activations between neighbouring layers (paper Section 4).

From rows laid out as A to B, slicing is free and one all-gather spans the factors in A∖B; backward runs the other way,
from B to A, so a change that is free in forward is paid in backward. Beyond the paper, sequences divided by sequence
parallelism are gathered before and sliced after (docs/cost-model.md, "Slice-Gather").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import Cluster, Factors, Layout, degree_of, lines_up
from galvatron.planner.cost.communication import Floats

__all__ = ["LayoutRates", "layout_rates"]

Item = TypeVar("Item")
Made = TypeVar("Made")


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
    take the way back.

    Many layouts share few ways to divide rows and few to divide sequences. Pairs of the former are looked at one by
    one; the rest is done with arrays.
    """
    rows, row_of = _distinct([layout.rows for layout in layouts])
    pairs = np.ix_(row_of, row_of)
    sequence, kept = _sequence_gathers(layouts, row_of[:, None] == row_of, cluster)
    degrees = np.array([degree_of(each) for each in rows])
    nested = _table(rows, lambda source, target: source <= target or target <= source)
    lined_up = nested | _table(rows, lines_up)
    # Slicing first leaves 1/|A∪B| of the rows on each rank, gathering g = |A∖B| such pieces 1/|B|; a source that is
    # gathered whole leaves all of them.
    by_factors = _Gathers.of(_all_pairs(rows, lambda source, target: source - target), cluster)
    all_rows = _Gathers.of(_all_pairs(rows, lambda source, _: source), cluster)
    gathered = by_factors.where(lined_up, all_rows).at(pairs)
    left = np.where(lined_up, degrees, 1)[pairs]
    either = lined_up & ~nested & (not always_factor_by_factor)  # where they are nested, both divide the rows anyway
    unions = _table(rows, lambda source, target: degree_of(source | target))

    first = sequence.per_byte(degrees[row_of][:, None] * kept)
    per_byte, fixed = first + gathered.per_byte(left * kept), sequence.latency_s + gathered.latency_s
    whole = all_rows.at(pairs)
    whole_per_byte = np.where(either[pairs], first + whole.per_byte(kept), 0.0)
    whole_fixed = np.where(either[pairs], sequence.latency_s + whole.latency_s, 0.0)
    return LayoutRates(
        per_byte=per_byte + back * per_byte.T,
        fixed_s=fixed + back * fixed.T,
        whole_per_byte=whole_per_byte + back * whole_per_byte.T,
        whole_fixed_s=whole_fixed + back * whole_fixed.T,
        rows=np.where(either, unions, 1)[pairs],
    )


@dataclass(frozen=True, slots=True)
class _Gathers:
    """All-gathers, (N, M) of them. A ring of g moves (g−1)/g of what a rank holds afterwards."""

    share: Floats
    bytes_per_s: Floats
    latency_s: Floats

    @classmethod
    def of(cls, factors: Sequence[Sequence[Factors]], cluster: Cluster) -> _Gathers:
        """Over these factors; over none nothing is gathered."""
        known = {each: (0.0, 1.0, 0.0) for row in factors for each in row}
        for each in known:
            if each:
                group, link = degree_of(each), cluster.link(each)
                known[each] = (group - 1) / group, link.bytes_per_s, link.latency_s
        table = np.array([[known[each] for each in row] for row in factors])
        return cls(*np.moveaxis(table, 2, 0))

    def at(self, pairs: tuple[NDArray[np.intp], ...]) -> _Gathers:
        return _Gathers(self.share[pairs], self.bytes_per_s[pairs], self.latency_s[pairs])

    def where(self, these: NDArray[np.bool_], others: _Gathers) -> _Gathers:
        """These for some of the pairs, the others for the rest."""
        mine, theirs = ((each.share, each.bytes_per_s, each.latency_s) for each in (self, others))
        return _Gathers(*(np.where(these, one, other) for one, other in zip(mine, theirs, strict=True)))

    def per_byte(self, parts: NDArray[np.int64]) -> Floats:
        """Seconds a byte of a boundary tensor of which so many parts are left."""
        seconds: Floats = self.share / parts / self.bytes_per_s
        return seconds


def _sequence_gathers(
    layouts: Sequence[Layout], rows_stay: NDArray[np.bool_], cluster: Cluster
) -> tuple[_Gathers, NDArray[np.int64]]:
    """How sequences are gathered from one layout to the other, and into how many parts they stay divided: what
    :func:`sequence_change` says of a pair, for all of them."""
    orders, order_of = _distinct([layout.order for layout in layouts])
    _, ring_of = _distinct([layout.zigzag for layout in layouts])
    factors, numbers = _distinct([factor for order in orders for factor in order])
    deepest = max(map(len, orders))
    placed = np.full((len(orders), deepest), len(factors))
    placed[np.arange(deepest) < np.array([[len(order)] for order in orders])] = numbers
    alike = np.cumprod(placed[:, None] == placed, axis=2) * (placed < len(factors))
    common = alike.sum(axis=2)[np.ix_(order_of, order_of)]
    stays = (ring_of[:, None] == ring_of) & (rows_stay | (order_of[:, None] == order_of))
    first = np.where(stays, common, 0)
    gathers = _Gathers.of([[frozenset(order[n:]) for n in range(deepest + 1)] for order in orders], cluster)
    kept = np.array([[degree_of(order[:n]) for n in range(deepest + 1)] for order in orders])
    places = (order_of[:, None], first)
    return gathers.at(places), kept[places]


def _distinct(items: Sequence[Item]) -> tuple[list[Item], NDArray[np.intp]]:
    """The items without repetitions, and which of them each is."""
    numbers = {each: number for number, each in enumerate(dict.fromkeys(items))}
    return list(numbers), np.array([numbers[each] for each in items], dtype=np.intp)


def _all_pairs(items: Sequence[Item], make: Callable[[Item, Item], Made]) -> list[list[Made]]:
    return [[make(source, target) for target in items] for source in items]


def _table(items: Sequence[Item], make: Callable[[Item, Item], int]) -> NDArray[Any]:
    return np.array(_all_pairs(items, make))
