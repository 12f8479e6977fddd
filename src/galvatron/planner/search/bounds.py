"""Lagrangian bounds: what a set of layers costs at least, whatever the strategies, within a budget.

For any multiplier λ ≥ 0 (time for a byte), Σ min(time + λ·memory) − λ·budget is a lower bound on the time of layers
that share the budget; layout changes are left out. The best λ is a slope of the lower convex hull of some kind's
strategies.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from galvatron.planner.cost import NEVER, Integers

__all__ = ["Floats", "few", "hull_multipliers"]

Floats = NDArray[np.float64]


def hull_multipliers(time: Integers, memory: Integers) -> Floats:
    """All multipliers at which some kind's best strategy changes, and zero: the bound is greatest at one of them."""
    slopes = {0.0}
    order = np.lexsort((time, memory))
    times, memories = np.take_along_axis(time, order, 1), np.take_along_axis(memory, order, 1)
    falling = np.minimum.accumulate(times, axis=1)
    keep = times < NEVER
    keep[:, 1:] &= falling[:, 1:] < falling[:, :-1]
    for row, kept in enumerate(keep):
        hull: list[tuple[int, int]] = []
        for more, fast in zip(memories[row, kept].tolist(), times[row, kept].tolist(), strict=True):
            while len(hull) > 1:
                (least, slowest), (less, slow) = hull[-2:]
                if (slow - slowest) * (more - least) < (fast - slowest) * (less - least):
                    break
                hull.pop()  # it lies on or above the line between its neighbours
            hull.append((more, fast))
        for (less, slow), (more, fast) in pairwise(hull):
            slopes.add((slow - fast) / (more - less))
    return np.array(sorted(slopes))


def few(lams: Floats, most: int) -> Floats:
    """At most so many of them, evenly spread: any multiplier gives a bound."""
    return lams[:: -(-len(lams) // most)]
