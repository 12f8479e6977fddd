"""Which groups the planner may need, by their ranks; and islands found from what pairs of devices get. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

from galvatron.core.spec import Digit, prime_factors

__all__ = ["digits_of", "groups_of", "islands", "shapes"]

_ALL_SUBSETS = 3
"""Up to so many digits (8 devices) every subset is measured; beyond, those that a single axis can own."""
_CLEARLY = 1.5
"""Factor between bandwidths from which on links are held to be different."""


def digits_of(devices: int) -> tuple[Digit, ...]:
    """The digits of a rank, innermost first."""
    digits, stride = [], 1
    for prime in reversed(prime_factors(devices)):
        digits.append(Digit(stride, prime))
        stride *= prime
    return tuple(digits)


def shapes(devices: int) -> list[tuple[Digit, ...]]:
    """The digits in which members of a group differ, for every shape to be measured."""
    digits = digits_of(devices)
    count = len(digits)
    if count <= _ALL_SUBSETS:
        return [subset for size in range(1, count + 1) for subset in combinations(digits, size)]
    return [digits[first:last] for first in range(count) for last in range(first + 1, count + 1)]


def groups_of(devices: int, digits: Sequence[Digit]) -> list[tuple[int, ...]]:
    """All groups of that shape: the devices in parts whose members differ in these digits only."""
    groups: dict[int, list[int]] = {}
    for rank in range(devices):
        first = rank - sum(rank // digit.stride % digit.radix * digit.stride for digit in digits)
        groups.setdefault(first, []).append(rank)
    return [tuple(group) for group in groups.values()]


def islands(digits: Sequence[Digit], bytes_per_s: Mapping[int, float], per_node: int) -> list[tuple[Digit, ...]]:
    """The digits of each level of islands, innermost first.

    ``bytes_per_s``: what neighbours along each digit get, by its stride. Inside a node a level ends where the next
    digit's links are clearly slower; between nodes one always ends.
    """
    levels = [[digits[0]]]
    for before, digit in pairwise(digits):
        slower = bytes_per_s[before.stride] / bytes_per_s[digit.stride] > _CLEARLY
        leaves_node = digit.stride == per_node
        if leaves_node or (slower and digit.block <= per_node):
            levels.append([])
        levels[-1].append(digit)
    return [tuple(level) for level in levels]
