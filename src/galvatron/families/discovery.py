"""The families there are: the folders beside this file that have a ``facts.py``. Imports no adapter, so no torch."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

from galvatron.families.family import Family

__all__ = ["families", "family_of"]


@cache
def families() -> dict[str, Family]:
    """Every family by its folder's name, in order of rank."""
    folders = sorted(facts.parent.name for facts in Path(__file__).parent.glob("*/facts.py"))
    found = {folder: _declared_in(folder) for folder in folders}
    return dict(sorted(found.items(), key=lambda item: item[1].rank))


def _declared_in(folder: str) -> Family:
    family: Family = import_module(f"galvatron.families.{folder}.facts").FAMILY
    return family


def family_of(model_type: str | None) -> Family | None:
    """The family whose configurations have this ``model_type``, or None."""
    return next((family for family in families().values() if family.model_type == model_type), None)
