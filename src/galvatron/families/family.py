"""What a family's folder declares in its ``facts.py``, as ``FAMILY``: all that the rest of the package asks of it.

``galvatron.families.discovery`` finds the folders; nothing outside a folder names its family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families.fields import Fields

__all__ = ["Architecture", "Family"]


class Architecture(Protocol):
    """Hyper-parameters of some family."""

    def spec(self, name: str, training: Training) -> ModelSpec:
        """The model's layers when trained this way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models. Presets are listed in groups, within a group in order of rank."""

    model_type: str
    """As a Hugging Face ``config.json`` says it."""
    head_class: str
    """The class of transformers with the pre-training head: built for this model type, and cut by the adapter."""
    read: Callable[[Fields], Architecture]
    """The hyper-parameters in the fields of a ``config.json``."""
    by_depth: Mapping[str, Callable[[int], Architecture]] = field(default_factory=dict)
    """Models that the paper varies in depth, by the name before the depth: "bert-huge" for "bert-huge-32"."""
    paper: Mapping[str, Architecture] = field(default_factory=dict)
    """The paper's models of one depth, by name."""
    known: Mapping[str, Architecture] = field(default_factory=dict)
    """Well-known models by name."""
    tiny: Mapping[str, Architecture] = field(default_factory=dict)
    """Models to try things with, by name."""
    recipes: frozenset[str] = frozenset()
    """Systems with a recipe for such models, where plans are exported to recipes."""
    rank: int = 1000
    """Place among the families; equal ranks are ordered by the folders' names."""
    paper_rank: int | None = None
    """Place among the paper's families. In all groups but the tiny ones they come first, then those without."""
