"""File formats as tables of keys: one declaration gives the reader, pydantic's check, the JSON schema and the writer.

A user's file is checked and then read. A preset, which comes with the package, is read unchecked: checking it would
import pydantic, and the tests check them all. Knows units, not clusters or profiles.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import naming, parse, read_text, shown, validate
from galvatron.core.units import parse_bytes, parse_bytes_per_s, parse_flops, parse_seconds

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = [
    "BANDWIDTH", "BYTES", "COMPUTE_RATE", "FLAG", "NAME", "SECONDS", "SOURCE", "Key", "Table", "Value", "number",
    "preset_names", "whole",
]  # fmt: skip

_T = TypeVar("_T")


def _same(value: Any) -> Any:
    return value


def _literal(value: Any) -> str:
    return repr(value) if type(value) in (int, float) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Value:
    """One value on one line."""

    type: Any
    """The type in the file."""
    limits: dict[str, Any] = field(default_factory=dict)
    """What else pydantic checks: arguments of ``pydantic.Field``."""
    check: Callable[[Any], None] = _same
    """Raises ValueError, saying what is expected, for what pydantic lets pass."""
    read: Callable[[Any], Any] = _same
    """From a right value in the file to the one in the program."""
    write: Callable[[Any], str] = _literal

    @property
    def checked(self) -> Any:
        from pydantic import AfterValidator, Field

        return Annotated[self.type, Field(**self.limits), AfterValidator(self.check)]

    def lines(self, key: str, value: Any) -> list[str]:
        return [f"{key} = {self.write(value)}"]


class Key(NamedTuple):
    """One key of a table; it may be left out where the attribute, a field of a dataclass, has a default."""

    key: str
    attribute: str
    kind: Value | Table[Any]
    about: str
    """What it means, for the schema and for the error when it is missing."""


@dataclass(frozen=True)
class Table(Generic[_T]):
    """A table of keys, from which an object of a dataclass is made: a file, or ``[device]`` or ``[[levels]]`` in it."""

    make: type[_T]
    keys: tuple[Key, ...]
    many: tuple[int, int] | None = None
    """The least and the most number of tables in a list; None: one table."""

    @cached_property
    def model(self) -> type[BaseModel]:
        """The pydantic model of one table."""
        from pydantic import ConfigDict, Field, create_model

        optional = {each.name for each in fields(self.make) if each.default is not MISSING}  # type: ignore[arg-type]
        declared: dict[str, Any] = {}
        for key in self.keys:
            default: Any = {"default_factory": lambda: None} if key.attribute in optional else {}
            declared[key.key] = (key.kind.checked, Field(description=key.about, **default))
        config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        return create_model(self.make.__name__, __config__=config, **declared)

    @property
    def checked(self) -> Any:
        from pydantic import Field

        if self.many is None:
            return self.model
        item: Any = self.model
        return Annotated[list[item], Field(min_length=self.many[0], max_length=self.many[1])]

    def make_one(self, content: dict[str, Any]) -> _T:
        """The object, from content that is right."""
        return self.make(**{key.attribute: key.kind.read(content[key.key]) for key in self.keys if key.key in content})

    def read(self, content: Any) -> Any:
        return tuple(map(self.make_one, content)) if self.many else self.make_one(content)

    def write(self, value: _T) -> list[str]:
        """Lines of TOML; what is None is left out."""
        held = [(key, getattr(value, key.attribute)) for key in self.keys]
        return [line for key, part in held if part is not None for line in key.kind.lines(key.key, part)]

    def lines(self, key: str, value: Any) -> list[str]:
        head, parts = (f"[[{key}]]", value) if self.many else (f"[{key}]", [value])
        return [line for part in parts for line in ("", head, *self.write(part))]

    def parse(self, text: str, file: str) -> _T:
        """The object in the text of a file, which is checked; ``file`` is its name in errors."""
        content = parse(text, file, "TOML")
        validate(self.model, content, file)
        with naming(file):
            return self.make_one(content)

    def load(self, source: str | Path, folder: str, what: str) -> _T:
        """What ``source`` names: the path of a ``.toml`` file, or a preset of the folder."""
        path, name = Path(source), str(source)
        if path.suffix == ".toml":
            return self.parse(read_text(path, f"a {what} in TOML").removeprefix("\ufeff"), name)
        names = preset_names(folder)
        if name in names:
            preset = resources.files(__package__).joinpath("presets", folder, f"{name}.toml")
            return self.make_one(tomllib.loads(preset.read_text(encoding="utf-8")))
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}."
        raise InvalidInput(f"unknown {what} {shown(name)}; {hint} The path of a .toml file will also do")


def preset_names(folder: str) -> tuple[str, ...]:
    """The names that a folder of presets knows."""
    files = resources.files(__package__).joinpath("presets", folder).iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


class Unit(NamedTuple):
    """A unit and its multiples."""

    parse: Callable[[Any], float]
    quantity: str
    example: str
    multiples: dict[str, float]
    """Those that are written, the unit itself last."""
    pattern: str
    """Matches those that are read, for the schema."""

    def between(self, least: str, most: str) -> Value:
        """A quantity. The limits leave out what only a forgotten unit can mean, such as ``bandwidth = 25``."""
        low, high = self.parse(least), self.parse(most)

        def check(value: Any) -> None:
            try:
                right = low <= self.parse(value) <= high
            except (InvalidInput, OverflowError):  # integers and exponents beyond what a float holds overflow
                right = False
            if not right:
                raise ValueError(f"{self.quantity} from {least} to {most}, such as {self.example}")

        number = r"([0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+)"
        as_text = {"type": "string", "pattern": rf"^\s*{number}\s*({self.pattern})\s*$"}
        schema = {"anyOf": [as_text, {"type": "number", "minimum": low, "maximum": high}]}
        return Value(Any, {"json_schema_extra": schema}, check, self.parse, self.write)

    def write(self, value: float) -> str:
        """The shortest text that reads back equal, so that figures look as people write them."""
        written = [f"{value / scale:.6g}{unit}" for unit, scale in self.multiples.items() if 0 <= value < math.inf]
        exact = [text for text in written if self.parse(text) == value]
        return json.dumps(min(exact, key=len) if exact else f"{value!r}{list(self.multiples)[-1]}")


_BYTE = r"([kKMGTP]|[KMGT]i)?"
BYTES = Unit(parse_bytes, "a size", "24GiB", {"GiB": 2**30, "GB": 1e9, "MiB": 2**20, "B": 1}, rf"{_BYTE}B?")
SECONDS = Unit(parse_seconds, "a time", "1.5ms", {"ms": 1e-3, "us": 1e-6, "s": 1}, "(ns|us|µs|μs|ms|s)?")
BANDWIDTH = Unit(
    parse_bytes_per_s,
    "a bandwidth",
    "12.5GB/s or 100Gb/s",
    {"GB/s": 1e9, "MB/s": 1e6, "B/s": 1},
    rf"{_BYTE}([bB]?(/s)?|bps)",
).between("1MB/s", "1PB/s")
COMPUTE_RATE = Unit(
    parse_flops,
    "a compute rate",
    "120TFLOP/s",
    {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "FLOP/s": 1},
    "[kKMGTP]?(FLOPS|FLOP/s|flops|flop/s)?",
).between("1MFLOP/s", "1000PFLOP/s")


def _printable(value: str) -> None:
    """Control characters would reach the user's terminal."""
    if not value.isprintable():
        raise ValueError("printable characters")


NAME = Value(str, {"min_length": 1, "max_length": 100}, _printable)
SOURCE = Value(str, {"max_length": 4000}, lambda value: _printable(value.replace("\n", " ")))
FLAG = Value(bool)


def whole(least: int, most: int) -> Value:
    """A whole number."""
    return Value(int, {"ge": least, "le": most})


def number(least: float, most: float) -> Value:
    """A number without unit."""
    return Value(float, {"ge": least, "le": most}, read=float)
