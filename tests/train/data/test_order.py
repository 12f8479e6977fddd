"""Shuffled orders: permutations, all of them, and as a function of the key."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from galvatron.train.data.order import generator_of, mixed, shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4096, 4097, 16385, 65536])
def test_each_number_once(size: int) -> None:
    for key in range(3):
        assert sorted(shuffled(np.arange(size), size, key)) == list(range(size))


@pytest.mark.parametrize("size", [1000, 10_000])
def test_places_can_be_asked_for_in_any_portion(size: int) -> None:
    whole = shuffled(np.arange(size), size, 7, 1)
    places = np.array([999, 0, 512, 3])
    assert list(shuffled(places, size, 7, 1)) == list(whole[places])


def test_a_large_data_set_costs_no_list() -> None:
    size = 10**12
    found = shuffled(np.arange(100), size, 0, 0)
    assert len(set(found)) == 100
    assert found.min() < size // 10 < size - size // 10 < found.max() < size


def test_all_permutations_are_about_equally_frequent() -> None:
    """24 permutations of 4, 2400 keys: each 100 times, give or take five standard deviations."""
    counts = Counter(tuple(shuffled(np.arange(4), 4, 11, key)) for key in range(2400))
    assert len(counts) == 24
    assert all(50 < count < 150 for count in counts.values()), counts


def test_every_place_gets_every_part_of_a_large_data_set() -> None:
    """The first place of 2000 orders, in ten parts of the numbers: 200 each, give or take five standard deviations."""
    firsts = [int(shuffled(np.zeros(1), 10_000, 3, key)[0]) for key in range(2000)]
    counts = Counter(first // 1000 for first in firsts)
    assert all(130 < counts[part] < 270 for part in range(10)), counts


def test_neighbours_part() -> None:
    """In a shuffled order the next number is a neighbour of this one about twice in all."""
    order = shuffled(np.arange(10_000), 10_000, 5)
    assert (abs(np.diff(order)) == 1).sum() < 12


def test_keys_of_other_order_or_sign_differ() -> None:
    found = {mixed(0, 1), mixed(1, 0), mixed(1), mixed(-1), mixed(0, 0, 1), mixed(2**63), mixed()}
    assert len(found) == 7
    assert generator_of(1, 2).initial_seed() == mixed(1, 2)
