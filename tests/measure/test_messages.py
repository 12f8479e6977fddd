"""Sizes of messages: the usual ones over fast links, and few enough bytes over slow ones to be done in minutes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from galvatron.measure.cluster_jobs.messages import USUAL, sizes_within


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_fast_link_gets_the_usual_sizes(kind: str) -> None:
    middle = USUAL[kind][1]
    assert sizes_within(USUAL[kind], middle / 1e9) == USUAL[kind]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("bytes_per_s", [1e5, 1e6, 1e7, 1e8])
def test_a_slow_link_is_not_kept_busy_for_long(kind: str, bytes_per_s: float) -> None:
    """A quarter of a second a message where that leaves a span wide enough for a line."""
    usual = USUAL[kind]
    sizes = sizes_within(usual, usual[1] / bytes_per_s)
    assert sizes[0] == usual[0]
    assert all(4 * smaller <= larger for smaller, larger in pairwise(sizes))
    assert all(size <= most for size, most in zip(sizes, usual, strict=True))
    assert sizes[2] / bytes_per_s <= 0.25 or sizes[2] == 16 * sizes[0]
