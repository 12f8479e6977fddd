"""Bytes, seconds and rates: parsed from what people write, formatted for people to read.

Inside the program bytes are ``int``, seconds ``float``, rates bytes or operations per second. ``GB`` is 10⁹ bytes and
``GiB`` is 2³⁰ bytes; a lower-case ``b`` is a bit. May know about errors only.
"""

from __future__ import annotations

import math
import re

from galvatron.core.errors import InvalidInput

__all__ = [
    "GIB",
    "MIB",
    "format_bytes",
    "format_count",
    "format_seconds",
    "parse_bytes",
    "parse_bytes_per_s",
    "parse_count",
    "parse_flops",
    "parse_seconds",
]

MIB = 2**20
GIB = 2**30

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_PREFIX = _DECIMAL | _BINARY
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-zµμ/·]*)\s*")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "": 1.0}


def parse_bytes(value: str | int | float, *, where: str = "size") -> int:
    """Read a size: ``8GB`` (8e9), ``8GiB`` or ``8Gi`` (8·2³⁰), ``512MiB``, or a plain number of bytes."""
    number, unit = _split(value, where, "a size such as 8GB, 8GiB or 512MiB")
    prefix = unit.removesuffix("B")
    if prefix not in _PREFIX:
        raise InvalidInput(
            f"{where}: {value!r} is not a size; write for example 8GB (8e9 bytes) or 8GiB (8·2^30 bytes)"
        )
    return round(_finite(number * _PREFIX[prefix], value, where))


def parse_bytes_per_s(value: str | int | float, *, where: str = "bandwidth") -> float:
    """Read a bandwidth: ``12.5GB/s``, ``4.1GiB/s``, ``100Gb/s`` or ``100Gbps`` (bits), or bytes per second."""
    number, unit = _split(value, where, "a bandwidth such as 12.5GB/s or 100Gb/s")
    unit = unit.replace("bps", "b/s").removesuffix("/s")
    bits = unit.endswith("b")
    prefix = unit[:-1] if unit[-1:] in ("b", "B") else unit
    if prefix not in _PREFIX:
        raise InvalidInput(f"{where}: {value!r} is not a bandwidth; write for example 12.5GB/s or 100Gb/s")
    return _finite(number * _PREFIX[prefix] / (8 if bits else 1), value, where)


def parse_count(value: str | int, *, where: str = "number") -> int:
    """Read how many: ``4M`` (4e6), ``4Mi`` (4·2²⁰), ``512k``, or a plain number."""
    number, unit = _split(value, where, "a number such as 4M or 4Mi")
    if unit not in _PREFIX:
        raise InvalidInput(f"{where}: {value!r} is not a number; write for example 4M (4e6) or 4Mi (4·2^20)")
    return round(_finite(number * _PREFIX[unit], value, where))


def parse_flops(value: str | int | float, *, where: str = "rate") -> float:
    """Read a compute rate: ``312TFLOP/s``, ``312TFLOPS``, or operations per second."""
    number, unit = _split(value, where, "a rate such as 120TFLOP/s")
    match = re.fullmatch(r"([kKMGTP]?)(?:FLOPS|FLOP/s|flops|flop/s|)", unit)
    if match is None:
        raise InvalidInput(f"{where}: {value!r} is not a compute rate; write for example 120TFLOP/s")
    return _finite(number * _DECIMAL[match[1]], value, where)


def parse_seconds(value: str | int | float, *, where: str = "time") -> float:
    """Read a time: ``20us``, ``1.5ms``, ``2s``, ``5min``, or seconds."""
    number, unit = _split(value, where, "a time such as 1.5ms, 2s or 5min")
    if unit not in _SECONDS:
        raise InvalidInput(f"{where}: {value!r} is not a time; write for example 20us, 1.5ms, 2s or 5min")
    return number * _SECONDS[unit]


def _split(value: str | int | float, where: str, expected: str) -> tuple[float, str]:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidInput(f"{where}: {value!r} is not {expected}")
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None:
            raise InvalidInput(f"{where}: {value!r} is not {expected}")
        number, unit = float(match[1]), match[2]
    else:
        try:
            number, unit = float(value), ""
        except OverflowError:
            number, unit = math.inf, ""
    if not math.isfinite(number) or number < 0:
        raise InvalidInput(f"{where}: {value!r} is not {expected}: it must be finite and not negative")
    return number, unit


def _finite(number: float, value: str | int | float, where: str) -> float:
    if math.isinf(number):
        raise InvalidInput(f"{where}: {value!r} is too large")
    return number


def format_bytes(count: float) -> str:
    """``8.00 GiB``, ``94.3 MiB``, ``512 B``: three significant digits in binary units."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """``1.85 s``, ``27.3 ms``, ``41.0 µs``."""
    if abs(seconds) >= 1 or seconds == 0:
        return f"{_three_digits(seconds)} s"
    if abs(seconds) >= 1e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} µs"


def format_count(count: float) -> str:
    """``672M``, ``10.2B``: parameters and operations, with the suffixes people use for them."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{_three_digits(count / size)}{unit}"
    return f"{count:.0f}"


def _three_digits(number: float) -> str:
    return f"{number:.{max(0, 2 - math.floor(math.log10(abs(number))))}f}" if number else "0"
