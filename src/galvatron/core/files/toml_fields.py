"""What a field of a TOML file may hold: text, flags, numbers, quantities with units; each read, written and described.

Plain code and not pydantic, because every plan starts by reading a cluster, and importing pydantic would take longer
than finding the plan. Errors name the file, the field, the value and what would be right. Knows units and errors, and
nothing of clusters or profiles.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.units import parse_bytes, parse_bytes_per_s, parse_flops, parse_seconds

__all__ = [
    "LONGEST_SHOWN",
    "Kind",
    "Place",
    "ascending",
    "bandwidth",
    "compute_rate",
    "duration",
    "flag",
    "number",
    "shown",
    "size",
    "text",
    "whole",
]

LONGEST_SHOWN = 60
"""Characters of a value that an error message repeats."""
_NUMBER = r"([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+)"


def shown(value: object) -> str:
    """A value for an error message: cut short, since a file may hold a megabyte where a name should be."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    if isinstance(value, str) and len(value) > LONGEST_SHOWN:
        return f"{value[:LONGEST_SHOWN]!r}… ({len(value)} characters)"
    return repr(value)


@dataclass(frozen=True)
class Place:
    """Where a value stands: a file, and the path of a field in it, such as ``levels[1].bandwidth``."""

    file: str
    field: str = ""

    def key(self, key: str) -> Place:
        return Place(self.file, f"{self.field}.{key}" if self.field else key)

    def index(self, index: int) -> Place:
        return Place(self.file, f"{self.field}[{index}]")

    def error(self, value: object, expected: str) -> InvalidInput:
        return InvalidInput(f"{self.file}: {self.field} is {shown(value)}; expected {expected}")


@dataclass(frozen=True)
class Kind:
    """What a field may hold."""

    read: Callable[[Any, Place], Any]
    """From the value in the file to the one in the program; an error names the place."""
    write: Callable[[Any, str], list[str]]
    """From the value in the program and a key to lines of TOML, which read back equal."""
    schema: dict[str, Any]


def _scalar(
    parse: Callable[[Any], Any], expected: str, schema: dict[str, Any], literal: Callable[[Any], str] = repr
) -> Kind:
    """A kind that is one value on one line; ``parse`` returns None for what it cannot be."""

    def read(value: Any, place: Place) -> Any:
        parsed = parse(value)
        if parsed is None:
            raise place.error(value, expected)
        return parsed

    return Kind(read, lambda value, key: [f"{key} = {literal(value)}"], schema)


def text(*, shortest: int = 1, longest: int = 100, lines: bool = False) -> Kind:
    """A string that can be printed (control characters would reach the user's terminal), on one line or several."""

    def parse(value: Any) -> str | None:
        if not isinstance(value, str) or not shortest <= len(value) <= longest:
            return None
        return value if (value.replace("\n", " ") if lines else value).isprintable() else None

    return _scalar(
        parse,
        f"text of {shortest} to {longest} printable characters",
        {"type": "string", "minLength": shortest, "maxLength": longest},
        lambda value: json.dumps(value, ensure_ascii=False),
    )


def flag() -> Kind:
    """True or false."""
    return _scalar(
        lambda value: value if isinstance(value, bool) else None,
        "true or false",
        {"type": "boolean"},
        lambda value: str(value).lower(),
    )


def whole(least: int, most: int) -> Kind:
    """A whole number."""

    def parse(value: Any) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most else None

    schema = {"type": "integer", "minimum": least, "maximum": most}
    return _scalar(parse, f"a whole number from {least} to {most}", schema)


def ascending(least: int, most: int, shortest: int, longest: int) -> Kind:
    """A list of different whole numbers, the smallest first."""

    def parse(value: Any) -> tuple[int, ...] | None:
        if not isinstance(value, list) or not shortest <= len(value) <= longest:
            return None
        whole = all(isinstance(one, int) and not isinstance(one, bool) for one in value)
        right = whole and least <= value[0] and value[-1] <= most and all(a < b for a, b in pairwise(value))
        return tuple(value) if right else None

    item = {"type": "integer", "minimum": least, "maximum": most}
    return _scalar(
        parse,
        f"{shortest} to {longest} whole numbers from {least} to {most} in ascending order, such as [0, 1]",
        {"type": "array", "minItems": shortest, "maxItems": longest, "items": item},
        lambda value: json.dumps(list(value)),
    )


def number(least: float, most: float) -> Kind:
    """A number without unit."""

    def parse(value: Any) -> float | None:
        right = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most  # NaN: false
        return float(value) if right else None

    schema = {"type": "number", "minimum": least, "maximum": most}
    return _scalar(parse, f"a number from {least:g} to {most:g}", schema)


def _quantity(
    parse: Callable[[Any], float],
    least: float,
    most: float,
    expected: str,
    units: tuple[tuple[str, float], ...],
    pattern: str,
) -> Kind:
    """A number with a unit: ``units`` are those to write, the base unit last; ``pattern`` matches those to read.

    The range leaves out what only a forgotten unit can mean, such as ``bandwidth = 25``.
    """

    def parse_in_range(value: Any) -> float | None:
        try:
            quantity = parse(value)
        except (InvalidInput, OverflowError):  # integers and exponents beyond what a float holds overflow
            return None
        return quantity if least <= quantity <= most else None

    def literal(value: float) -> str:
        written = [f"{value / scale:.6g}{unit}" for unit, scale in units] if 0 <= value < math.inf else []
        exact = [text for text in written if parse(text) == value]
        return f'"{min(exact, key=len) if exact else f"{value!r}{units[-1][0]}"}"'

    as_text = {"type": "string", "pattern": rf"^\s*{_NUMBER}\s*({pattern})\s*$"}
    schema = {"anyOf": [as_text, {"type": "number", "minimum": least, "maximum": most}]}
    return _scalar(parse_in_range, expected, schema, literal)


def size(least: str) -> Kind:
    """A number of bytes."""
    return _quantity(
        parse_bytes,
        parse_bytes(least),
        2**50,
        f"a size of at least {least} such as 24GiB or 80GB",
        (("GiB", 2**30), ("GB", 1e9), ("MiB", 2**20), ("B", 1)),
        "([kKMGTP]|[KMGT]i)?B?",
    )


def bandwidth() -> Kind:
    """Bytes per second."""
    return _quantity(
        parse_bytes_per_s,
        1e6,
        1e15,
        "a bandwidth of at least 1MB/s such as 12.5GB/s or 100Gb/s",
        (("GB/s", 1e9), ("MB/s", 1e6), ("B/s", 1)),
        "([kKMGTP]|[KMGT]i)?([bB]?(/s)?|bps)",
    )


def compute_rate() -> Kind:
    """Operations per second."""
    return _quantity(
        parse_flops,
        1e6,
        1e18,
        "a compute rate of at least 1MFLOP/s such as 120TFLOP/s",
        (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("FLOP/s", 1)),
        "[kKMGTP]?(FLOPS|FLOP/s|flops|flop/s)?",
    )


def duration(least: str, most: str) -> Kind:
    """Seconds."""
    return _quantity(
        parse_seconds,
        parse_seconds(least),
        parse_seconds(most),
        f"a time from {least} to {most} such as 20us or 1.5ms",
        (("ms", 1e-3), ("us", 1e-6), ("s", 1.0)),
        "(ns|us|µs|μs|ms|s)?",
    )
