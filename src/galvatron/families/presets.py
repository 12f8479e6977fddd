"""Models by name: the paper's (Table 1 and Section 5.5), well-known ones, and tiny ones to try things with.

Each family declares its own (``galvatron.families.family``); here they become one list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache

from galvatron.families.discovery import families
from galvatron.families.family import Architecture, Family

__all__ = ["find_preset", "preset_names"]

_PAPER_DEPTHS = (32, 48)


@cache
def _by_depth() -> dict[str, Callable[[int], Architecture]]:
    return {stem: make for family in _paper_first() for stem, make in family.by_depth.items()}


@cache
def _presets() -> dict[str, Architecture]:
    """Those without a depth in their name, in the order in which they are listed."""
    groups = (
        *(family.paper for family in _paper_first()),
        *(family.known for family in _paper_first()),
        *(family.tiny for family in families().values()),
    )
    return {name: architecture for group in groups for name, architecture in group.items()}


def _paper_first() -> list[Family]:
    return sorted(families().values(), key=lambda family: math.inf if family.paper_rank is None else family.paper_rank)


def find_preset(name: str) -> Architecture | None:
    """The preset of this name, or None."""
    if name in _presets():
        return _presets()[name]
    match = re.fullmatch(r"(.+)-([1-9][0-9]{0,3})", name)
    if match is None or match[1] not in _by_depth():
        return None
    return _by_depth()[match[1]](int(match[2]))


def preset_names() -> tuple[str, ...]:
    """Every preset, the paper's first; those with a depth in their name exist for other depths too."""
    return (*(f"{stem}-{depth}" for stem in _by_depth() for depth in _PAPER_DEPTHS), *_presets())
