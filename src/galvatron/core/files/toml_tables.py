"""File formats as tables of fields: one declaration gives the reader, the writer and the JSON schema.

All that is wrong in a file is said at once. Knows nothing of clusters or profiles.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, TypeVar

from galvatron.core.errors import InvalidInput
from galvatron.core.files.toml_fields import LONGEST_SHOWN, Kind, Place, shown

__all__ = ["Entry", "Table", "table", "tables"]

_T = TypeVar("_T")


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
    close = difflib.get_close_matches(key[:LONGEST_SHOWN], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    at = place.key(key if key.isidentifier() and len(key) <= LONGEST_SHOWN else shown(key))
    return f"{at.file}: {at.field} is not a known key; {hint}"
