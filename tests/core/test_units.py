"""Units as people write them: what they mean, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron.core.errors import InvalidInput
from galvatron.core.units import (
    GIB,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_flops,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GB", 8_000_000_000),
        ("8GiB", 8_589_934_592),
        ("8Gi", 8_589_934_592),
        ("512MiB", 536_870_912),
        ("1.5KiB", 1536),
        ("1kB", 1000),
        ("1TB", 10**12),
        ("  8 GB ", 8_000_000_000),
        ("17", 17),
        ("17B", 17),
        ("1e3", 1000),
        (".5k", 500),
        (24, 24),
        (1.5e9, 1_500_000_000),
    ],
)
def test_sizes(text: str | int | float, count: int) -> None:
    parsed = parse_bytes(text)
    assert parsed == count
    assert isinstance(parsed, int)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("12.5GB/s", 12.5e9),
        ("100Gb/s", 12.5e9),  # bits
        ("100Gbps", 12.5e9),
        ("4GiB/s", 4 * 2**30),
        ("8Mib/s", 2**20),
        ("1.6TB/s", 1.6e12),
        (5e9, 5e9),
    ],
)
def test_bandwidths(text: str | float, rate: float) -> None:
    assert parse_bytes_per_s(text) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "rate"), [("312TFLOP/s", 312e12), ("312TFLOPS", 312e12), ("1.2PFLOP/s", 1.2e15), ("9e12", 9e12), (7, 7.0)]
)
def test_compute_rates(text: str | int, rate: float) -> None:
    assert parse_flops(text) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("20us", 20e-6), ("20µs", 20e-6), ("20μs", 20e-6), ("3ns", 3e-9), ("1.5ms", 1.5e-3)),
        *(("2s", 2.0), ("5min", 300.0), (0.25, 0.25)),
    ],
)
def test_times(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


PARSERS: list[Callable[..., float]] = [parse_bytes, parse_bytes_per_s, parse_flops, parse_seconds]


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "GB", "-1", "-1GB", "1,5GB", "1 000", "0x10", "nan", "inf", "1e999", "1GBs", "8GB 8GB", "8gigs"),
        *(math.nan, math.inf, -math.inf, -1, -0.5, True, None, [], {}),
    ],
)
def test_what_is_no_quantity_is_refused(parse: Callable[..., float], value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(value, where="the field")
    assert str(caught.value).startswith("the field: ")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bytes, "8Gb"),  # bits are no size
        (parse_bytes, "8GB/s"),
        (parse_bytes, "8gb"),
        (parse_bytes, "8ms"),
        (parse_bytes_per_s, "100Gb/h"),
        (parse_bytes_per_s, "20us"),
        (parse_flops, "312GB/s"),
        (parse_flops, "312GiFLOP/s"),
        (parse_seconds, "20GB"),
        (parse_seconds, "20weeks"),
    ],
)
def test_the_unit_of_something_else_is_refused(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(InvalidInput, match="write for example"):
        parse(text)


@given(st.text(max_size=30) | st.integers(-(2**64), 2**64) | st.floats(max_value=1e300) | st.booleans() | st.none())
def test_a_parser_returns_a_finite_number_or_says_no(value: object) -> None:
    for parse in PARSERS:
        try:
            number = parse(value)
        except InvalidInput:
            continue
        assert 0 <= number < math.inf


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        (parse_bytes, "1e308GB"),
        (parse_bytes, 10**400),
        (parse_bytes_per_s, "1e308GB/s"),
        (parse_flops, "1e308TFLOP/s"),
    ],
)
def test_what_overflows_is_refused(parse: Callable[..., float], value: str | int) -> None:
    with pytest.raises(InvalidInput):
        parse(value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1.00 KiB"),
        (94.3 * 2**20, "94.3 MiB"),
        (8 * GIB, "8.00 GiB"),
        (123 * GIB, "123 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_sizes_are_written_in_three_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.85, "1.85 s"), (125, "125 s"), (0.0273, "27.3 ms"), (41e-6, "41.0 µs"), (2e-9, "0.00200 µs")],
)
def test_times_are_written_in_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1.00k"), (672e6, "672M"), (10.2e9, "10.2B"), (1e12, "1.00T")]
)
def test_counts_are_written_with_the_suffixes_people_use(count: float, text: str) -> None:
    assert format_count(count) == text


@given(st.integers(min_value=1024, max_value=2**49))
def test_a_written_size_reads_back_within_half_a_percent(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.005)


@given(st.floats(min_value=1e-6, max_value=1e6))
def test_a_written_time_reads_back_within_half_a_percent(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.0051)
