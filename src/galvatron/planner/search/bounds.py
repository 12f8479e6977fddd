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

__all__ = ["Floats", "hull_multipliers"]

Floats = NDArray[np.float64]


def hull_multipliers(time: Integers, memory: Integers) -> Floats:
    """All multipliers at which some kind's best strategy changes, and zero: the bound is greatest at one of them."""
    slopes = {0.0}
    for times, memories in zip(time, memory, strict=True):
        usable = np.nonzero(times < NEVER)[0]
        order = usable[np.lexsort((times[usable], memories[usable]))]
        falling = np.minimum.accumulate(times[order])
        keep = np.append(True, falling[1:] < falling[:-1]) if len(order) else np.empty(0, dtype=bool)
        hull: list[tuple[int, int]] = []
        for point in zip(memories[order[keep]].tolist(), times[order[keep]].tolist(), strict=True):
            while len(hull) > 1 and _above(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        for (less, slow), (more, fast) in pairwise(hull):
            slopes.add((slow - fast) / (more - less))
    return np.array(sorted(slopes))


def _above(first: tuple[int, int], middle: tuple[int, int], last: tuple[int, int]) -> bool:
    """Whether the middle point lies on or above the line from first to last."""
    return (middle[1] - first[1]) * (last[0] - first[0]) >= (last[1] - first[1]) * (middle[0] - first[0])
