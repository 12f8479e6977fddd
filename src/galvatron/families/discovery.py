"""The families there are: the folders beside this file that have a module ``facts``. Imports no torch."""

from __future__ import annotations

import os
import pkgutil
from functools import cache
from importlib import import_module

from galvatron.families.family import Family

__all__ = ["families", "family_of"]


@cache
def families() -> dict[str, Family]:
    """Every family by its folder's name, in order of rank."""
    here = os.path.dirname(__file__)
    folders = [found.name for found in pkgutil.iter_modules([here]) if found.ispkg]
    # Listing a folder imports nothing of it: a folder without facts may need torch.
    with_facts = [
        folder
        for folder in sorted(folders)
        if any(found.name == "facts" for found in pkgutil.iter_modules([os.path.join(here, folder)]))
    ]
    found = {folder: _facts(folder) for folder in with_facts}
    return dict(sorted(found.items(), key=lambda item: item[1].rank))


def _facts(folder: str) -> Family:
    family: Family = import_module(f"galvatron.families.{folder}.facts").FAMILY
    return family


def family_of(model_type: str | None) -> Family | None:
    """The family whose configurations have this ``model_type``, or None."""
    return next((family for family in families().values() if family.model_type == model_type), None)
