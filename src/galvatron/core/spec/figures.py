"""What facts may be: what no model, cluster or profile can have is refused where it is given, from files and Python.

A figure's unit is in its name, and the unit has a range: wide enough for all that exists, and narrow enough that what
the planner computes from it is a finite number. What leaves the range of its integers all the same (a layer that
computes for hours) the search sees: ``galvatron.planner.cost.tables``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import fields
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from galvatron.core.errors import OutOfRange

__all__ = ["MOST_DEVICES", "MOST_LAYERS", "MOST_SAMPLES", "MOST_TOKENS", "check_facts"]

MOST_LAYERS = 2048
"""Of a model. Tables of stages grow with the square of it."""
MOST_DEVICES = 2**20
MOST_TOKENS = 2**26
"""Of a sample."""
MOST_SAMPLES = 2**22
"""Of a batch."""


class _Range(NamedTuple):
    least: float
    most: float
    whole: bool = True

    @property
    def expected(self) -> str:
        if self.whole:
            return f"a whole number from {self.least:.0f} to {self.most:.0f}"
        return f"a number from {self.least:g} to {self.most:g}"


_COUNT = _Range(0, 2**50)
_RANGES = {
    "bytes_per_s": _Range(1, 1e18, whole=False),
    "flops_per_s": _Range(1, 1e21, whole=False),
    "bytes": _COUNT,
    "flops": _Range(0, 2**60),
    "parameters": _COUNT,
    "logits": _COUNT,
    "inputs": _COUNT,
    "outputs": _COUNT,
    "weights": _COUNT,
    "s": _Range(0, 1e6, whole=False),
    "per_hour": _Range(0, 1e9, whole=False),
    "w": _Range(0, 1e9, whole=False),
    "collectives": _Range(0, 1000),
    "traffic": _Range(0, 100, whole=False),
    "ratio": _Range(0, 1e6, whole=False),
    "share": _Range(0, 1e6, whole=False),
    "imbalance": _Range(1, 2**20, whole=False),
    "slowdown": _Range(1, 1000, whole=False),
    "contention": _Range(1, MOST_DEVICES, whole=False),
    "fragmentation": _Range(0, 0.9, whole=False),
    "sequence_length": _Range(1, MOST_TOKENS),
    "length": _Range(1, MOST_TOKENS),
    "heads": _Range(0, 2**20),
    "image_size": _Range(1, 2**16),
    "image_tokens": _Range(0, MOST_TOKENS),
    "units": _Range(1, MOST_DEVICES),
    "count": _Range(1, 10**6),
    "rank": _Range(1, 2**20),
    "alpha": _Range(0, 1e9, whole=False),
    "tp": _Range(1, MOST_DEVICES),
    "ep": _Range(1, MOST_DEVICES),
}
"""By the last words of a figure's name."""


def check_facts(facts: Any, what: str) -> None:
    """Raises :class:`OutOfRange` where a dataclass has a figure out of range, or a value of another kind than its field
    says; ``what`` says whose facts they are.
    """
    cls = cast("Hashable", type(facts))
    for name, limits in _figures(cls):
        value = getattr(facts, name)
        if value is None:
            continue
        kind = int if limits.whole else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not limits.least <= value <= limits.most:
            raise OutOfRange(f"{what}: {name} is {_shown(value)}; expected {limits.expected}")
        if not limits.whole and isinstance(value, int):  # files read it back as 300e9
            object.__setattr__(facts, name, float(value))
    for name, kinds in _kinds(cls):
        value = getattr(facts, name)
        if not any(_is_a(value, each) for each in kinds):
            expected = " or ".join(_kind_shown(each) for each in kinds)
            raise OutOfRange(f"{what}: {name} is {_shown(value)}; expected {expected}")


@cache
def _kinds(kind: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Of each field the types that its values may have."""
    hints = get_type_hints(kind)
    unions = (Union, UnionType)
    kinds = {
        each.name: get_args(hint) if get_origin(hint := hints[each.name]) in unions else (hint,)
        for each in fields(kind)
    }
    return tuple((name, given) for name, given in kinds.items() if Any not in given)


def _is_a(value: object, kind: Any) -> bool:
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_a(each, get_args(kind)[0]) for each in value)
    return isinstance(value, get_origin(kind) or kind)


def _kind_shown(kind: Any) -> str:
    """In plain words, for errors."""
    if get_origin(kind) is tuple:
        return f"a tuple, of {_kind_shown(get_args(kind)[0])} each"
    name: str = getattr(kind, "__name__", str(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(f"{name}.{each}" for each in kind.__members__)
    words = {NoneType: "None", str: "text", bool: "True or False", int: "a whole number", float: "a number"}
    return words.get(kind) or f"a {name}"


@cache
def _figures(kind: Any) -> tuple[tuple[str, _Range], ...]:
    """The figures among a dataclass's fields."""
    named = ((each.name, _range(each.name)) for each in fields(kind))
    return tuple((name, limits) for name, limits in named if limits is not None)


def _range(name: str) -> _Range | None:
    words = name.split("_")
    endings = ("_".join(words[first:]) for first in range(len(words)))
    return next((_RANGES[ending] for ending in endings if ending in _RANGES), None)


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 2**63:
        return "an integer of more than 63 bits"
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else repr(value)[:60]
