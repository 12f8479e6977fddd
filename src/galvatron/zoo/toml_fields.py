"""File formats as tables of fields: one declaration gives the reader, the writer and the JSON schema.

Plain code and not pydantic, because every plan starts by reading a cluster, and importing pydantic would take longer
than finding the plan. Errors name the file, the field, the value and what would be right, and all that is wrong in a
file is said at once. Knows units and errors, and nothing of clusters or profiles.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, TypeVar

from galvatron.errors import InvalidInput
from galvatron.units import parse_bytes, parse_bytes_per_s, parse_flops, parse_seconds

__all__ = [
    "Entry",
    "Kind",
    "Place",
    "Table",
    "bandwidth",
    "compute_rate",
    "duration",
    "flag",
    "number",
    "shown",
    "size",
    "table",
    "tables",
    "text",
    "whole",
]

_T = TypeVar("_T")
_LONGEST_SHOWN = 60
_NUMBER = r"([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+)"


def shown(value: object) -> str:
    """A value for an error message: cut short, since a file may hold a megabyte where a name should be."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    if isinstance(value, str) and len(value) > _LONGEST_SHOWN:
        return f"{value[:_LONGEST_SHOWN]!r}… ({len(value)} characters)"
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


@dataclass(frozen=True)
class Entry:
    """One key of a table."""

    key: str
    attribute: str
    """The field of the dataclass it fills; where that has a default, the key may be left out."""
    kind: Kind
    about: str
    """What it means, for the schema and for the error when it is missing."""


@dataclass(frozen=True)
class Table(Generic[_T]):
    """A table of entries, from which an object of a dataclass is made."""

    make: type[_T]
    entries: tuple[Entry, ...]

    def read(self, value: Any, place: Place) -> _T:
        """The object, or one error with a line for each problem."""
        keys = [entry.key for entry in self.entries]
        if not isinstance(value, dict):
            raise place.error(value, f"a table with the keys {', '.join(keys)}")
        problems = [_unknown(key, place, keys) for key in value if key not in keys]
        required = self._required()
        arguments: dict[str, Any] = {}
        for entry in self.entries:
            at = place.key(entry.key)
            if entry.key in value:
                try:
                    arguments[entry.attribute] = entry.kind.read(value[entry.key], at)
                except InvalidInput as error:
                    problems.append(str(error))
            elif entry.attribute in required:
                problems.append(f"{at.file}: {at.field} is missing; expected {entry.about}")
        if problems:
            raise InvalidInput("\n".join(problems))
        return self.make(**arguments)

    def write(self, value: _T) -> list[str]:
        """Lines of TOML; what is None is left out."""
        held = [(entry, getattr(value, entry.attribute)) for entry in self.entries]
        return [line for entry, part in held if part is not None for line in entry.kind.write(part, entry.key)]

    def schema(self) -> dict[str, Any]:
        required = self._required()
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [entry.key for entry in self.entries if entry.attribute in required],
            "properties": {entry.key: {"description": entry.about} | entry.kind.schema for entry in self.entries},
        }

    def _required(self) -> set[str]:
        return {field.name for field in fields(self.make) if field.default is MISSING}  # type: ignore[arg-type]


def table(inner: Table[Any]) -> Kind:
    """A table inside a table: ``[device]``."""
    return Kind(inner.read, lambda value, key: ["", f"[{key}]", *inner.write(value)], inner.schema())


def tables(inner: Table[Any], *, least: int, most: int) -> Kind:
    """A list of equal tables: ``[[levels]]``."""

    def read(value: Any, place: Place) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise place.error(value, f"{least} to {most} [[{place.field}]] tables")
        parts, problems = [], []
        for index, part in enumerate(value):
            try:
                parts.append(inner.read(part, place.index(index)))
            except InvalidInput as error:
                problems.append(str(error))
        if problems:
            raise InvalidInput("\n".join(problems))
        return tuple(parts)

    def write(value: tuple[Any, ...], key: str) -> list[str]:
        return [line for part in value for line in ("", f"[[{key}]]", *inner.write(part))]

    return Kind(read, write, {"type": "array", "minItems": least, "maxItems": most, "items": inner.schema()})


def _unknown(key: str, place: Place, known: list[str]) -> str:
    close = difflib.get_close_matches(key[:_LONGEST_SHOWN], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    at = place.key(key if key.isidentifier() and len(key) <= _LONGEST_SHOWN else shown(key))
    return f"{at.file}: {at.field} is not a known key; {hint}"
