"""Tensor-parallel rules: which weights of a stock layer are split, and how. The experts of a layer, which expert
parallelism divides. Data only; the runtime applies them.

Paths are relative to the layer. Megatron's scheme (paper Section 3.1): within a region the first projections are split
by columns, the last by rows; inputs enter through f (identity, all-reduce in backward) and leave through g (all-reduce,
identity in backward).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AddedBias",
    "Attribute",
    "Columns",
    "DividedExperts",
    "Experts",
    "PartialGradients",
    "Region",
    "Rows",
    "Rule",
    "SharedKey",
    "Summed",
    "Table",
    "Vocabulary",
    "VocabularyLoss",
    "Whole",
]


@dataclass(frozen=True, slots=True)
class Columns:
    """A projection (``nn.Linear`` or Hugging Face's ``Conv1D``) split by output features, its bias too."""

    path: str
    parts: int = 1
    """Projections fused into one weight, each split by itself (3: query, key and value side by side)."""
    reads: str | None = None
    """The region's argument that it projects; None: the first."""
    input: int | None = None
    """Outside of regions: projections with the same number read the same tensor, whose gradient is summed once for all
    of them. None: nobody else reads it."""
    gathered: bool = False
    """Whether its outputs are put together again: what follows is computed whole on each rank."""
    heads: int | None = None
    """How many heads its outputs are, where a run showed it: a degree must divide them."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A projection split by input features; its outputs are summed, its bias is whole and added once."""

    path: str
    takes_whole: bool = False
    """Whether its inputs are whole on each rank, which then uses its part of them."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """An ``nn.Embedding`` split by rows; the looked-up vectors are summed. Uneven where the degree does not divide."""

    path: str


@dataclass(frozen=True, slots=True)
class Table:
    """A parameter that is split along ``dim``: with attention heads there, such as a relative position table, or with
    the features of experts."""

    path: str
    dim: int
    parts: int = 1
    """Weights fused into one along the dim, each split by itself."""
    pairs: bool = False
    """Whether neighbours along the dim belong together (a gate and what it multiplies, in turns)."""

    def features(self, size: int) -> int:
        """How many can be told apart along a dim of this size."""
        return size // 2 if self.pairs else size // self.parts


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


@dataclass(frozen=True, slots=True)
class PartialGradients:
    """A module inside the split part with whole parameters (a norm of each head), or one such parameter: every rank's
    gradients of them come from its own heads, and are summed."""

    path: str


@dataclass(frozen=True, slots=True)
class Experts:
    """A module with the experts of a layer, whose tables are split: it takes hidden states, chosen experts and their
    weights (f is applied to the first and the last), and its outputs are summed."""

    path: str


@dataclass(frozen=True, slots=True)
class AddedBias:
    """A whole bias of experts that are split, which goes into outputs that are summed over ranks: each adds its share,
    and so has a part of the gradient."""

    path: str


@dataclass(frozen=True, slots=True)
class SharedKey:
    """A whole projection whose last ``width`` outputs go straight into the split heads (the rotary key of multi-head
    latent attention): f is applied to these."""

    path: str
    width: int


@dataclass(frozen=True, slots=True)
class Summed:
    """A module whose outputs are partial, and summed."""

    path: str


Rule = (
    Columns
    | Rows
    | Vocabulary
    | Table
    | Region
    | Attribute
    | VocabularyLoss
    | Whole
    | PartialGradients
    | Experts
    | AddedBias
    | SharedKey
    | Summed
)


@dataclass(frozen=True, slots=True)
class DividedExperts:
    """The experts of a layer, of which expert parallelism gives each rank some: a module that takes hidden states
    (tokens, features), the experts chosen for each token and the router's weights of these (tokens, chosen). Its
    attribute ``num_experts`` says how many it has."""

    path: str
    count: int
    parameters: tuple[str, ...]
    """Their names in the module; each has the experts along its first dim. The module has no others."""
    split: tuple[Rule, ...] = ()
    """How TP can split all of them, where their form says it."""
