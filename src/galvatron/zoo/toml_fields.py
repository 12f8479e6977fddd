"""TOML files as tables of checked fields: one declaration a file format gives its reader, its writer and its schema.

Plain code and not pydantic, because the planner reads a cluster at every start and importing pydantic takes longer than
finding the plan. Errors name the file, the field, the value and what would be right; all problems of a file are
reported together. Knows units and errors, and nothing of clusters or profiles.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from galvatron.errors import InvalidInput
from galvatron.units import parse_bytes, parse_bytes_per_s, parse_flops, parse_seconds

__all__ = [
    "Entry",
    "Flag",
    "Number",
    "Place",
    "Quantity",
    "Table",
    "Tables",
    "Text",
    "Whole",
    "bandwidth",
    "compute_rate",
    "duration",
    "parse_toml",
    "read_text",
    "size",
]

_T = TypeVar("_T")
_LONGEST_SHOWN = 60
_NUMBER = r"([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: a file and the path of a field in it, such as ``levels[1].bandwidth``."""

    file: str
    field: str = ""

    def key(self, key: str) -> Place:
        return Place(self.file, f"{self.field}.{key}" if self.field else key)

    def index(self, index: int) -> Place:
        return Place(self.file, f"{self.field}[{index}]")

    def error(self, value: object, expected: str) -> InvalidInput:
        return InvalidInput(f"{self.file}: {self.field} is {_shown(value)}; expected {expected}")


def _shown(value: object) -> str:
    """A value for an error message: whole where short, since files may hold a megabyte where a name should be."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    if isinstance(value, str) and len(value) > _LONGEST_SHOWN:
        return f"{value[:_LONGEST_SHOWN]!r}… ({len(value)} characters)"
    return repr(value)


class Kind(Protocol):
    """What a field may hold."""

    def read(self, value: Any, place: Place) -> Any:
        """The value for the program, or an error that names the place."""

    def write(self, value: Any, key: str) -> list[str]:
        """Lines of TOML that read back equal."""

    def schema(self) -> dict[str, Any]:
        """The same as JSON schema."""


@dataclass(frozen=True, slots=True)
class Text:
    """A string that can be printed: control characters would reach the user's terminal."""

    shortest: int = 1
    longest: int = 100
    lines: bool = False
    """Whether it may have several lines."""

    def read(self, value: Any, place: Place) -> str:
        if isinstance(value, str) and self.shortest <= len(value) <= self.longest:
            flat = value.replace("\n", " ") if self.lines else value
            if flat.isprintable():
                return value
        raise place.error(value, f"text of {self.shortest} to {self.longest} printable characters")

    def write(self, value: Any, key: str) -> list[str]:
        return [f"{key} = {json.dumps(value, ensure_ascii=False)}"]

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": self.shortest, "maxLength": self.longest}


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def read(self, value: Any, place: Place) -> bool:
        if not isinstance(value, bool):
            raise place.error(value, "true or false")
        return value

    def write(self, value: Any, key: str) -> list[str]:
        return [f"{key} = {str(value).lower()}"]

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in a range."""

    least: int
    most: int

    def read(self, value: Any, place: Place) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            raise place.error(value, f"a whole number from {self.least} to {self.most}")
        return value

    def write(self, value: Any, key: str) -> list[str]:
        return [f"{key} = {value}"]

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True)
class Number:
    """A number without unit in a range."""

    least: float
    most: float

    def read(self, value: Any, place: Place) -> float:
        # A NaN is in no range.
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.least <= value <= self.most:
            raise place.error(value, f"a number from {self.least:g} to {self.most:g}")
        return float(value)

    def write(self, value: Any, key: str) -> list[str]:
        return [f"{key} = {value}"]

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number with a unit. The range leaves out what only a forgotten unit can mean: ``bandwidth = 25``."""

    parse: Callable[[str | int | float], float]
    least: float
    most: float
    expected: str
    units: tuple[tuple[str, float], ...]
    """Units to write it in, the preferred first; the last is the base unit."""
    pattern: str
    """The units that can be read, as a regular expression for the schema."""

    def read(self, value: Any, place: Place) -> float:
        try:
            number = self.parse(value)
        except (InvalidInput, OverflowError):  # an exponent or an integer beyond floats overflows
            raise place.error(value, self.expected) from None
        if not self.least <= number <= self.most:
            raise place.error(value, self.expected)
        return number

    def write(self, value: Any, key: str) -> list[str]:
        for unit, scale in self.units:
            text = f"{value / scale:.6g}{unit}"
            if value >= scale and self.parse(text) == value:
                return [f'{key} = "{text}"']
        return [f'{key} = "{value!r}{self.units[-1][0]}"']

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "pattern": rf"^\s*{_NUMBER}\s*({self.pattern})\s*$"}
        return {"anyOf": [text, {"type": "number", "minimum": self.least, "maximum": self.most}]}


def size(least: str) -> Quantity:
    """A number of bytes."""
    return Quantity(
        parse=parse_bytes,
        least=parse_bytes(least),
        most=2**50,
        expected=f"a size of at least {least} such as 24GiB or 80GB",
        units=(("GiB", 2**30), ("GB", 1e9), ("MiB", 2**20), ("B", 1)),
        pattern="([kKMGTP]|[KMGT]i)?B?",
    )


bandwidth = Quantity(
    parse=parse_bytes_per_s,
    least=1e6,
    most=1e18,
    expected="a bandwidth of at least 1MB/s such as 12.5GB/s or 100Gb/s",
    units=(("GB/s", 1e9), ("MB/s", 1e6), ("B/s", 1)),
    pattern="([kKMGTP]|[KMGT]i)?([bB]?(/s)?|bps)",
)
compute_rate = Quantity(
    parse=parse_flops,
    least=1e6,
    most=1e21,
    expected="a compute rate of at least 1MFLOP/s such as 120TFLOP/s",
    units=(("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("FLOP/s", 1)),
    pattern="[kKMGTP]?(FLOPS|FLOP/s|flops|flop/s)?",
)


def duration(*, least: float, most: float, expected: str) -> Quantity:
    """A time."""
    return Quantity(
        parse=parse_seconds,
        least=least,
        most=most,
        expected=expected,
        units=(("ms", 1e-3), ("us", 1e-6), ("s", 1.0)),
        pattern="(ns|us|µs|μs|ms|s)?",
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a table."""

    key: str
    attribute: str
    """The field of the dataclass it fills; where that has a default, the key may be left out."""
    kind: Kind
    about: str
    """What it means, for the schema and the error when it is missing."""


@dataclass(frozen=True)
class Table(Generic[_T]):
    """A table of entries that makes an object of a dataclass."""

    make: type[_T]
    entries: tuple[Entry, ...]

    def read(self, value: Any, place: Place) -> _T:
        """The object, or one error with a line for each problem."""
        if not isinstance(value, dict):
            raise place.error(value, f"a table with the keys {', '.join(self._keys())}")
        problems = [_unknown(key, place, self._keys()) for key in value if key not in self._keys()]
        arguments: dict[str, Any] = {}
        for entry in self.entries:
            at = place.key(entry.key)
            if entry.key in value:
                try:
                    arguments[entry.attribute] = entry.kind.read(value[entry.key], at)
                except InvalidInput as error:
                    problems.append(str(error))
            elif entry.attribute in self._required():
                problems.append(f"{at.file}: {at.field} is missing; expected {entry.about}")
        if problems:
            raise InvalidInput("\n".join(problems))
        return self.make(**arguments)

    def write(self, value: Any, key: str) -> list[str]:
        return ["", f"[{key}]", *self.lines(value)]

    def lines(self, value: Any) -> list[str]:
        """The entries; those that are None are left out."""
        held = [(entry, getattr(value, entry.attribute)) for entry in self.entries]
        return [line for entry, part in held if part is not None for line in entry.kind.write(part, entry.key)]

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [entry.key for entry in self.entries if entry.attribute in self._required()],
            "properties": {entry.key: {"description": entry.about} | entry.kind.schema() for entry in self.entries},
        }

    def _keys(self) -> tuple[str, ...]:
        return tuple(entry.key for entry in self.entries)

    def _required(self) -> frozenset[str]:
        return frozenset(field.name for field in fields(self.make) if field.default is MISSING)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Tables:
    """A list of equal tables (``[[levels]]``)."""

    table: Table[Any]
    least: int = 0
    most: int = 1000

    def read(self, value: Any, place: Place) -> tuple[Any, ...]:
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            raise place.error(value, f"{self.least} to {self.most} [[{place.field}]] tables")
        parts, problems = [], []
        for index, part in enumerate(value):
            try:
                parts.append(self.table.read(part, place.index(index)))
            except InvalidInput as error:
                problems.append(str(error))
        if problems:
            raise InvalidInput("\n".join(problems))
        return tuple(parts)

    def write(self, value: Any, key: str) -> list[str]:
        return [line for part in value for line in ("", f"[[{key}]]", *self.table.lines(part))] or [f"{key} = []"]

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "minItems": self.least, "maxItems": self.most, "items": self.table.schema()}


def _unknown(key: str, place: Place, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key[:_LONGEST_SHOWN], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    shown = key if key.isidentifier() and len(key) <= _LONGEST_SHOWN else _shown(key)
    at = place.key(shown)
    return f"{at.file}: {at.field} is not a known key; {hint}"


def read_text(path: Path, what: str) -> str:
    """The text of a file the user named."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InvalidInput(f"{path}: no such file; expected {what} in TOML") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not text (byte {error.start} is not UTF-8); expected {what} in TOML") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InvalidInput(f"{path}: cannot be read ({error}); expected {what} in TOML") from None


def parse_toml(text: str, place: Place) -> dict[str, Any]:
    """The content of a file, not yet checked."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise InvalidInput(f"{place.file}: is not TOML: {error}; correct the file there") from None
    except RecursionError:
        raise InvalidInput(f"{place.file}: is nested too deep to be read; write plain tables") from None
