"""Tensor-parallel rules: which weights of a stock layer are split, and how. Data only; the runtime applies them.

Paths are relative to the layer. Megatron's scheme (paper Section 3.1): within a region the first projections are split
by columns, the last by rows; inputs enter through f (identity, all-reduce in backward) and leave through g (all-reduce,
identity in backward).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Attribute", "Columns", "Region", "Rows", "Rule", "Table", "Vocabulary", "VocabularyLoss", "Whole"]


@dataclass(frozen=True, slots=True)
class Columns:
    """A projection (``nn.Linear`` or Hugging Face's ``Conv1D``) split by output features, its bias too."""

    path: str
    parts: int = 1
    """Projections fused into one weight, each split by itself (3: query, key and value side by side)."""
    reads: str | None = None
    """The region's argument that it projects; None: the first."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A projection split by input features; its outputs are summed, its bias is whole and added once."""

    path: str


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """An ``nn.Embedding`` split by rows; the looked-up vectors are summed. Uneven where the degree does not divide."""

    path: str


@dataclass(frozen=True, slots=True)
class Table:
    """A parameter with attention heads along ``dim``, such as a relative position table."""

    path: str
    dim: int


@dataclass(frozen=True, slots=True)
class Region:
    """A module whose inputs enter the split part: f is applied once to each of these arguments, of which the first may
    be passed by position. Inside, only projections split by columns read them. Random numbers drawn inside differ from
    rank to rank."""

    path: str
    arguments: tuple[str, ...] = ("hidden_states",)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A Python integer on a module that counts heads or features of the whole layer and is divided by the degree."""

    path: str


@dataclass(frozen=True, slots=True)
class VocabularyLoss:
    """A :class:`galvatron.families.layer.CrossEntropy` whose logits are split by vocabulary."""

    path: str


@dataclass(frozen=True, slots=True)
class Whole:
    """A module within a region that works on summed outputs again (a dropout behind the last projection): the random
    numbers it draws are those of outside the region."""

    path: str


Rule = Columns | Rows | Vocabulary | Table | Region | Attribute | VocabularyLoss | Whole
