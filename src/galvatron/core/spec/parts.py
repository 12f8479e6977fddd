"""Parts of what a layer is to the planner: how it is split, its experts, its loss, what recompute may keep of it."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron.core.errors import OutOfRange
from galvatron.core.spec.figures import check_facts
from galvatron.core.spec.strategy import Kind, Strategy

__all__ = ["Context", "Experts", "FusedLoss", "Kept", "TensorParallel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """How a layer behaves when its weights are split over t devices (Megatron's scheme)."""

    divides: tuple[int, ...] = ()
    """The degree must divide each of these: attention heads, key/value heads. Empty: any degree (padded vocabulary)."""
    forward_collectives: int
    """All-reduces in forward (a block: attention and feed-forward, so 2; with cross-attention 3)."""
    backward_collectives: int
    """All-reduces in backward."""
    message_bytes: int
    """Size of each for one sample."""
    sequence_divides: tuple[int, ...] = ()
    """Lengths of the sequences along which what TP replicates can be divided; with sequence parallelism the degree must
    divide each of them. Empty: it cannot be divided."""

    def __post_init__(self) -> None:
        check_facts(self, "tensor_parallel")
        for name in ("divides", "sequence_divides"):
            wrong = [count for count in getattr(self, name) if not 1 <= count < 2**63]
            if wrong:
                raise OutOfRange(f"tensor_parallel: {name} holds {wrong[0]}; expected numbers from 1 to {2**63 - 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """How the sequences of a layer can be divided over devices (context parallelism).

    A layer without attention along the sequence (embedding, head) has a length alone: it works on its slice.
    """

    length: int
    """Tokens of a sample."""
    heads: int = 0
    """Of attention; 0: the layer has none. The degree of Ulysses must divide them, and those of keys and values."""
    key_value_heads: int = 0
    causal: bool = True
    """Whether a token attends to those before it only."""
    ring: bool = True
    """Whether keys and values may go round: not where attention has dropout."""
    attention_flops: int = 0
    """Of the layer's forward_flops, those of scores and their products with values, as a kernel does them that leaves
    out what a causal mask hides; part of what TP divides."""
    query_bytes: int = 0
    """Queries of one sample, and as much the result of attention."""
    key_value_bytes: int = 0
    """Keys and values of one sample together."""

    def __post_init__(self) -> None:
        check_facts(self, "context")

    def problem(self, strategy: Strategy) -> str | None:
        """Why sequences cannot be divided as the strategy says; None: they can. TP divides heads before Ulysses does; a
        ring needs two chunks a rank."""
        ring, ulysses, tensor = (strategy.degree(kind) for kind in (Kind.RING, Kind.ULYSSES, Kind.TP))
        if any(heads % (tensor * ulysses) for heads in (self.heads, self.key_value_heads)):
            return f"its {self.heads} heads, {self.key_value_heads} of keys and values, do not divide"
        if ring > 1 and not self.ring:
            return "its attention has dropout, which a ring cannot; take ulysses, or leave dropout out (--no-dropout)"
        slices = tensor if strategy.sequence_parallel else 1
        chunks = (2 * ring if ring > 1 else 1) * ulysses * slices
        return f"{self.length} tokens are no multiple of {chunks}" if self.length % chunks else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of a layer: of its figures, the part that belongs to them. A router sends each token to a few."""

    count: int
    """The degree of EP must divide it."""
    parameters: int
    """Of all experts together; part of the layer's parameters."""
    forward_flops: int
    """Part of the layer's."""
    activation_bytes: int
    """What tokens save inside their experts; part of the layer's split_activation_bytes, divided by TP of experts."""
    replicated_activation_bytes: int = 0
    """What tokens save on their way in and out (copies of each token, one an expert); part of the layer's
    replicated_activation_bytes, whole on each rank of the experts' TP."""
    dispatch_bytes: int
    """What one sample's tokens take on their way to the experts: tokens × experts of a token × width × element."""
    divides: tuple[int, ...] = ()
    """The degree of the experts' TP must divide each of these: the width inside an expert."""
    forward_collectives: int = 1
    """Of the layer's TP all-reduces in forward, those of the experts alone; with axes of their own they do others."""
    backward_collectives: int = 1
    imbalance: float = 1.0
    """Tokens of the busiest device over the mean, where EP divides the experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedLoss:
    """What a head has that can compute its loss in chunks of tokens, keeping no logits."""

    logits: int
    """Of one sample: tokens × words."""
    saved_bytes: int
    """Of the layer's split_activation_bytes, those that are then not saved."""
    parameters: int
    """Of the projection: their gradient is kept from forward to backward. Divided by TP."""
    words: int = 0
    """Of the vocabulary; 0: nobody said how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What a layer keeps beside its input where all but some results are recomputed, and what is then done again."""

    split_bytes: int
    """Of one sample, divided by TP."""
    replicated_bytes: int = 0
    """Whole on each tensor-parallel rank (sequence parallelism divides these too)."""
    sent_bytes: int = 0
    """The same, of results of collectives, which are kept where there is TP."""
    flops: int
    """Operations that are done again; part of forward's."""
