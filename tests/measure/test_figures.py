"""Figures from timings: known constants are recovered, disturbed blocks are left out, nothing comes out negative."""

from __future__ import annotations

import random

import pytest

from galvatron.measure.figures import Block, Line, fit_line, quality_of, reading_of


def test_a_line_is_recovered_exactly_from_exact_points() -> None:
    sizes = (1 << 14, 1 << 18, 1 << 21)
    found = fit_line([(size, 3e-4 + size / 2e9) for size in sizes])
    assert found.fixed == pytest.approx(3e-4)
    assert found.slope == pytest.approx(1 / 2e9)


def test_small_messages_count_as_much_as_large_ones() -> None:
    """Five percent of noise on a message a thousand times as slow must not drown the latency."""
    noise = random.Random(0)
    points = [(10.0**k, (1e-3 + 1e-8 * 10**k) * noise.uniform(0.95, 1.05)) for k in range(1, 9)]
    found = fit_line(points)
    assert found.fixed == pytest.approx(1e-3, rel=0.1)
    assert found.slope == pytest.approx(1e-8, rel=0.1)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 1.0), (2, 2.5), (4, 5.5)], "fixed"),  # the straight line through these begins below zero
        ([(1, 3.0), (2, 2.0), (4, 1.0)], "slope"),
    ],
)
def test_no_part_is_negative(points: list[tuple[float, float]], expected: str) -> None:
    found = fit_line(points)
    assert min(found.fixed, found.slope) >= 0
    assert getattr(found, expected) == 0
    assert max(found.fixed, found.slope) > 0


def test_one_point_is_a_constant() -> None:
    assert fit_line([(4, 2.0)]) == Line(2.0, 0.0)


def test_disturbed_blocks_are_left_out() -> None:
    quiet = [Block((1.0, 10.0), 0.01), Block((1.1, 11.0), 0.05), Block((0.9, 9.0), 0.0)]
    busy = [Block((5.0, 50.0), 0.6), Block((7.0, 70.0), 0.9)]
    assert reading_of([busy[0], *quiet, busy[1]]).seconds == 1.0
    assert reading_of([busy[0], *quiet, busy[1]], 1).seconds == 10.0


def test_where_all_are_disturbed_the_least_disturbed_speak() -> None:
    blocks = [Block((float(k),), 0.5 + k / 100) for k in range(1, 10)]
    assert reading_of(blocks).seconds == 2.0  # the median of the first three


def test_repeatability_compares_two_interleaved_passes() -> None:
    reading = reading_of([Block((seconds,)) for seconds in (1.0, 2.0, 1.0, 2.0)])
    assert reading.seconds == 1.5
    assert reading.repeatability == pytest.approx(1 / 1.5)
    assert reading_of([Block((3.0,))] * 4).repeatability == 0


def test_a_profiles_quality_is_that_of_its_typical_figure() -> None:
    readings = [reading_of([Block((1.0,)), Block((1.0 + spread,))]) for spread in (0.0, 0.1, 4.0)]
    assert quality_of(readings, 2).repeatability == pytest.approx(0.1 / 1.05)
