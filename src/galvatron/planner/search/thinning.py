"""What need not be tried: candidates that others beat in every price."""

from __future__ import annotations

import numpy as np

from galvatron.planner.cost import Integers
from galvatron.planner.cost.arrays import Places
from galvatron.planner.search.bounds import Floats

__all__ = ["undominated"]

_MANY = 32
"""Rounds after which further ones find little for their time."""


def undominated(groups: Places, prices: Floats | Integers, rounds: int = _MANY) -> Places:
    """Which things, of (D, N) prices, no other of the same group beats: one that is at most as dear in all D ways.

    Of equal ones the first is kept. In the order of its prices the first of a group beats or ties all it can compare
    with, so it is kept, and what it beats is dropped; then the first of the rest. After so many rounds what is left is
    kept as well.
    """
    order = np.lexsort((*prices[::-1], groups))
    here, prices = groups[order], prices[1:, order]  # in the first price a rival is never dearer
    left, kept = np.arange(len(order)), [np.empty(0, dtype=np.intp)]
    while left.size and len(kept) <= rounds:
        first = np.ones(left.size, dtype=bool)
        np.not_equal(here[1:], here[:-1], out=first[1:])
        kept.append(left[first])
        rivals = left[np.maximum.accumulate(np.where(first, np.arange(left.size), 0))]
        stays = np.zeros(left.size, dtype=bool)
        for price in prices:
            stays |= price[rivals] > price[left]
        left, here = left[stays], here[stays]
    return np.sort(order[np.concatenate([*kept, left])])
