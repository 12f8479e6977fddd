"""Which strategies can run which kinds of layer, for thousands of strategies at once.

Whether a strategy can depends on two things that have nothing to do with each other: what divides a sample, and the
switches with the experts' axes. There are few of each, however many strategies there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from galvatron.core.spec import LayerSpec, ModelSpec, Strategy

__all__ = ["allowed"]

Supports = Callable[[LayerSpec, Strategy], bool]


def allowed(
    model: ModelSpec, kinds: Sequence[LayerSpec], strategies: Sequence[Strategy], supports: Supports
) -> NDArray[np.bool_]:
    """(T, S) whether a strategy can run a kind of layer: it divides it, and its switches and the axes of its experts
    are supported."""
    divides = _spread(kinds, strategies, [(each.divided, each.sequence_parallel) for each in strategies], model.divides)
    return divides & _spread(kinds, strategies, [(each.switches, each.experts) for each in strategies], supports)


def _spread(
    kinds: Sequence[LayerSpec], strategies: Sequence[Strategy], keys: Sequence[object], holds: Supports
) -> NDArray[np.bool_]:
    """(T, S) what holds for one strategy of each key, for all of them."""
    first = dict(zip(reversed(keys), reversed(strategies), strict=True))
    numbers = {key: number for number, key in enumerate(first)}
    places = np.array([numbers[key] for key in keys], dtype=np.intp)
    return np.array([[holds(kind, each) for each in first.values()] for kind in kinds], dtype=np.bool_)[:, places]
