"""Fine-tuning, as far as memory and time depend on it: parameters that are frozen, and adapters beside them."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.figures import check_figures

__all__ = ["ALL_LINEAR", "Lora", "Tuning", "stock_kind"]

ALL_LINEAR = "all-linear"
"""Instead of names of projections: all of them but the head's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Low-rank adapters, as peft's ``LoraConfig`` says it: W x + alpha / rank · B A x, of which A and B train."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Ends of names of the projections that have one."""

    def __post_init__(self) -> None:
        check_figures(self, "lora")
        if self.rank < 1 or not self.alpha > 0:
            raise InvalidInput(f"lora: rank {self.rank}, alpha {self.alpha:g} given; expected at least 1, and above 0")
        if not self.targets:
            raise InvalidInput(f"lora-targets: none given; expected names of projections, or {ALL_LINEAR}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Of a layer that is fine-tuned: which of its parameters do not train, and what was added to it.

    What is frozen has no gradient and no optimizer state, and is held in the type that layers compute in.
    """

    frozen_parameters: int = 0
    """Part of the layer's parameters."""
    frozen_replicated_parameters: int = 0
    """Of these, the ones that each tensor-parallel rank holds whole."""
    frozen_tied_parameters: int = 0
    """Of these, the ones that belong to an earlier layer."""
    frozen_expert_parameters: int = 0
    backward: bool = True
    """Whether gradients reach the layer: not where nothing in it nor before it trains."""
    adapter_parameters: int = 0
    """Of low-rank adapters; part of the layer's parameters, as the next ones are of its other figures."""
    adapter_replicated_parameters: int = 0
    adapter_flops: int = 0
    adapter_activation_bytes: int = 0


def stock_kind(name: str) -> str:
    """The kind of layer of the stock model that a fine-tuned one is of: ``decoder`` for ``decoder+frozen``."""
    return name.partition("+")[0]
