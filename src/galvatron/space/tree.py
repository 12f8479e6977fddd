"""Decision trees: every way to spread one layer over the devices of a stage (paper Section 3.2).

A tree of a stage with n devices has one level a parallelism, each kind at most once, degrees of at least two whose
product is n. Its paths are ordered, outermost level first, because the order decides which links a group spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import permutations

from galvatron.spec.strategy import Axis, Kind, Strategy

__all__ = ["divisors", "pipeline_degrees", "tree"]


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


def pipeline_degrees(devices: int) -> tuple[int, ...]:
    """Degrees of pipeline parallelism: applied first, it divides the devices into equal stages (Takeaway #2)."""
    return divisors(devices)


def tree(devices: int, kinds: Iterable[Kind] = tuple(Kind)) -> tuple[Strategy, ...]:
    """All paths of the decision tree for a stage of this many devices, without any flag."""
    if devices == 1:
        return (Strategy(),)
    kinds = tuple(kinds)
    return tuple(
        Strategy(tuple(Axis(kind, degree) for kind, degree in zip(order, degrees, strict=True)))
        for depth in range(1, len(kinds) + 1)
        for order in permutations(kinds, depth)
        for degrees in _ordered_factors(devices, depth)
    )


def _ordered_factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if number >= 2:
            yield (number,)
        return
    for first in divisors(number):
        if first >= 2:
            for rest in _ordered_factors(number // first, parts - 1):
                yield (first, *rest)
