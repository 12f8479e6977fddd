"""Which groups the planner may need, by their ranks; and islands found from what pairs of devices get. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

from galvatron.core.spec import Factor, prime_factors

__all__ = ["factors_of", "groups_of", "islands", "shapes"]

_ALL_SUBSETS = 3
"""Up to so many factors (8 devices) every subset is measured; beyond, those that a single axis can own."""
_CLEARLY = 1.5
"""Factor between bandwidths from which on links are held to be different."""


def factors_of(devices: int) -> tuple[Factor, ...]:
    """The factors of a rank, innermost first."""
    factors, stride = [], 1
    for prime in reversed(prime_factors(devices)):
        factors.append(Factor(stride, prime))
        stride *= prime
    return tuple(factors)


def shapes(devices: int) -> list[tuple[Factor, ...]]:
    """The factors in which members of a group differ, for every shape to be measured."""
    factors = factors_of(devices)
    count = len(factors)
    if count <= _ALL_SUBSETS:
        return [subset for size in range(1, count + 1) for subset in combinations(factors, size)]
    return [factors[first:last] for first in range(count) for last in range(first + 1, count + 1)]


def groups_of(devices: int, factors: Sequence[Factor]) -> list[tuple[int, ...]]:
    """All groups of that shape: the devices in parts whose members differ in these factors only."""
    groups: dict[int, list[int]] = {}
    for rank in range(devices):
        first = rank - sum(rank // factor.stride % factor.size * factor.stride for factor in factors)
        groups.setdefault(first, []).append(rank)
    return [tuple(group) for group in groups.values()]


def islands(factors: Sequence[Factor], bytes_per_s: Mapping[int, float], per_node: int) -> list[tuple[Factor, ...]]:
    """The factors of each level of islands, innermost first.

    ``bytes_per_s``: what neighbours along each factor get, by its stride. Inside a node a level ends where the next
    factor's links are clearly slower; between nodes one always ends.
    """
    levels = [[factors[0]]]
    for before, factor in pairwise(factors):
        slower = bytes_per_s[before.stride] / bytes_per_s[factor.stride] > _CLEARLY
        leaves_node = factor.stride == per_node
        if leaves_node or (slower and factor.block <= per_node):
            levels.append([])
        levels[-1].append(factor)
    return [tuple(level) for level in levels]
