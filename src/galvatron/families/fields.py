"""Single fields of a parsed configuration, each checked, with errors that name file, field, value and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.figures import MOST_LAYERS
from galvatron.families.facts.ops import ACTIVATIONS

__all__ = ["Fields"]

_LARGEST = 2**32
"""Of any count: nothing real comes near, and sums stay readable."""
_LABELS = 2
"""Classes of a configuration that names none."""


class Fields:
    """The fields of one file. A null counts as left out, as it does for transformers' optional fields."""

    def __init__(self, path: Path, content: Mapping[str, object]) -> None:
        self._path = path
        self._content = content

    def error(self, field: str, value: object, expected: str) -> InvalidInput:
        """The error for a field: where, what, and what would be right."""
        return InvalidInput(f"{self._path}: {field} is {value!r}; expected {expected}")

    def _find(self, fields: tuple[str, ...]) -> tuple[str, object]:
        """The first of several spellings that is present."""
        for field in fields:
            if self._content.get(field) is not None:
                return field, self._content[field]
        return fields[0], None

    def count(self, *fields: str, default: int) -> int:
        """A positive integer under any of several spellings."""
        field, value = self._find(fields)
        return default if value is None else self._whole(field, value, _LARGEST)

    def layers(self, *fields: str, default: int) -> int:
        """A number of layers."""
        field, value = self._find(fields)
        return default if value is None else self._whole(field, value, MOST_LAYERS)

    def optional_count(self, field: str) -> int | None:
        """A positive integer that may be left out."""
        _, value = self._find((field,))
        return None if value is None else self._whole(field, value, _LARGEST)

    def hidden_and_heads(
        self, hidden_fields: tuple[str, ...], hidden: int, head_fields: tuple[str, ...], heads: int
    ) -> tuple[int, int]:
        """The hidden size and the heads that divide it, each with its spellings and its default."""
        hidden, heads = self.count(*hidden_fields, default=hidden), self.count(*head_fields, default=heads)
        if hidden % heads:
            raise self.error(head_fields[0], heads, f"a divisor of {hidden_fields[0]} ({hidden})")
        return hidden, heads

    def counts(self, field: str, *, default: tuple[int, ...]) -> tuple[int, ...]:
        """A list of positive integers, one for each stage."""
        _, value = self._find((field,))
        if value is None:
            return default
        if not isinstance(value, list) or not 1 <= len(value) <= 16:
            raise self.error(field, value, "a list of 1 to 16 positive integers")
        return tuple(self._whole(f"{field}[{index}]", entry, MOST_LAYERS) for index, entry in enumerate(value))

    def pair(self, field: str, *, default: int) -> tuple[int, int]:
        """A height and a width: one number for both, or a list of two."""
        _, value = self._find((field,))
        if isinstance(value, list):
            if len(value) != 2:
                raise self.error(field, value, "a positive integer, or a list of height and width")
            first, second = value
            return self._whole(f"{field}[0]", first, _LARGEST), self._whole(f"{field}[1]", second, _LARGEST)
        side = default if value is None else self._whole(field, value, _LARGEST)
        return side, side

    def labels(self) -> int:
        """The number of classes, which a configuration writes as a table of their names."""
        _, table = self._find(("id2label",))
        if table is None:
            return self.count("num_labels", default=_LABELS)
        if not isinstance(table, dict) or not table:
            raise self.error("id2label", table, "an object that names each class")
        return len(table)

    def flag(self, field: str, default: bool) -> bool:
        """True or false."""
        _, value = self._find((field,))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, value, "true or false")
        return value

    def probability(self, field: str, *, default: float) -> float:
        """A dropout probability."""
        _, value = self._find((field,))
        if value is None:
            return default
        number = self._number(field, value, "a probability: at least 0, less than 1")
        if not 0 <= number < 1:
            raise self.error(field, value, "a probability: at least 0, less than 1")
        return number

    def positive(self, field: str, *, default: float) -> float:
        """A finite number above zero."""
        _, value = self._find((field,))
        if value is None:
            return default
        number = self._number(field, value, "a number above 0")
        if not 0 < number <= _LARGEST:
            raise self.error(field, value, "a number above 0")
        return number

    def text(self, field: str, *, default: str | None = None) -> str:
        """A string; required unless there is a default."""
        _, value = self._find((field,))
        if value is None and default is not None:
            return default
        if value is None:
            raise InvalidInput(f"{self._path}: {field} is missing; expected a string")
        if not isinstance(value, str):
            raise self.error(field, value, "a string")
        return value

    def rope_type(self) -> str:
        """How rotary positions are stretched, under the spellings that configurations have had."""
        _, value = self._find(("rope_parameters", "rope_scaling"))
        found = value.get("rope_type", value.get("type")) if isinstance(value, Mapping) else None
        return found if isinstance(found, str) else "default"

    def activation(self, field: str, *, default: str) -> str:
        """The name of an activation whose memory is known."""
        return self.known_activation(field, self.text(field, default=default))

    def known_activation(self, field: str, name: str) -> str:
        """The same for a name that was part of the field."""
        if name not in ACTIVATIONS:
            raise self.error(field, name, f"one of {', '.join(ACTIVATIONS)}")
        return name

    def _whole(self, field: str, value: object, largest: int) -> int:
        expected = f"an integer from 1 to {largest}"
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise self.error(field, value, expected)
        return value

    def _number(self, field: str, value: object, expected: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:  # nan: not <=
            raise self.error(field, value, expected)
        return float(value)
