"""Models by name: the paper's (Table 1 and Section 5.5), well-known ones, and tiny ones to try things with.

Each family declares its own (``galvatron.families.family``); here they become one list. What people train today is in
``configurations/``, as Hugging Face's configurations; of some of these nobody counts the layers, so they are traced.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families.discovery import families
from galvatron.families.family import Architecture, Family

__all__ = ["configured_names", "find_preset", "preset_names"]

_CONFIGURATIONS = Path(__file__).parent / "configurations"

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
    if name in configured_names():
        return _Configured(_CONFIGURATIONS / f"{name}.json")
    match = re.fullmatch(r"(.+)-([1-9][0-9]{0,3})", name)
    if match is None or match[1] not in _by_depth():
        return None
    return _by_depth()[match[1]](int(match[2]))


@dataclass(frozen=True, slots=True)
class _Configured:
    """A model by its Hugging Face configuration."""

    path: Path

    def spec(self, name: str, training: Training) -> ModelSpec:
        from galvatron.families.huggingface import model_of_config

        return model_of_config(json.loads(self.path.read_text(encoding="utf-8")), self.path, name, training)


@cache
def configured_names() -> tuple[str, ...]:
    """The models of today, by name."""
    return tuple(sorted((path.stem for path in _CONFIGURATIONS.glob("*.json")), key=_by_size))


def _by_size(name: str) -> list[tuple[int, float, str]]:
    """``llama3.1-8b`` before ``llama3.1-70b``."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(0, float(part), "") if place % 2 else (1, 0.0, part) for place, part in enumerate(parts)]


def preset_names() -> tuple[str, ...]:
    """Every preset whose layers are counted, the paper's first; those with a depth in their name exist for other depths
    too."""
    return (*(f"{stem}-{depth}" for stem in _by_depth() for depth in _PAPER_DEPTHS), *_presets())
