"""Orders and random numbers that are functions of a few integers: nothing to keep, nothing to save.

A shuffled epoch is a permutation that is computed place by place (a Feistel network), so that a data set of any size is
shuffled without a list, and a run that resumes in the middle of an epoch need not redo its beginning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["generator_of", "mixed", "shuffled"]

_Words = npt.NDArray[np.uint64]
_STEP = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6
_SMALL = 4096
"""Up to this size the whole permutation is made: six rounds over few bits would reach too few of them."""


def _mix(words: _Words) -> _Words:
    """SplitMix64 (Steele, Lea, Flood 2014): a bijection of words in which each bit changes half of the others."""
    words = words + _STEP
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = words ^ (words >> np.uint64(31))
    return mixed


def mixed(*numbers: int) -> int:
    """A 63-bit number that depends on each of these and on their order."""
    state: _Words = np.zeros(1, np.uint64)
    for number in numbers:
        state = _mix(state ^ np.array([number % 2**64], np.uint64))
    return int(state[0]) >> 1


def generator_of(*numbers: int) -> torch.Generator:
    """A generator of random numbers for these, the same in every process."""
    return torch.Generator().manual_seed(mixed(*numbers))


def shuffled(places: npt.NDArray[Any], size: int, *key: int) -> npt.NDArray[np.int64]:
    """What stands at these places of a permutation of ``range(size)``; each key has its own permutation.

    A small one is the order of random numbers. For others a network permutes a power of four that is at least ``size``;
    a result outside is permuted again until it falls inside ("cycle walking"), which keeps it a permutation of the
    inside.
    """
    if size <= _SMALL:
        numbers = _mix(np.arange(size, dtype=np.uint64) ^ np.uint64(mixed(*key)))
        order: npt.NDArray[np.int64] = np.argsort(numbers, kind="stable")[places]
        return order
    half = np.uint64(((size - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mixed(*key, number)) for number in range(_ROUNDS)]
    found = np.asarray(places, np.uint64)
    walking = np.ones(found.shape, bool)
    while walking.any():
        left, right = found[walking] >> half, found[walking] & low
        for word in keys:
            left, right = right, left ^ (_mix(right ^ word) & low)
        found[walking] = (left << half) | right
        walking = found >= np.uint64(size)
    return found.astype(np.int64)
