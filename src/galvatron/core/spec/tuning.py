"""Fine-tuning, as far as memory and time depend on it: parameters that are frozen, and adapters beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.figures import check_facts

__all__ = ["ALL_LINEAR", "Lora", "Tuning", "is_within", "stock_kind"]

ALL_LINEAR = "all-linear"
"""Instead of names of projections: all of them but the head's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Low-rank adapters, as peft's ``LoraConfig`` says it: W x + alpha / rank · B A x, of which A and B train."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Ends of names of the projections that have one."""
    full: tuple[str, ...] | None = None
    """Ends of names of modules that train as they are beside the adapters, as ``modules_to_save`` of peft has them:
    ``norm`` is the end of ``input_layernorm``, too. None: nobody has said, and the model's class decides."""

    def __post_init__(self) -> None:
        check_facts(self, "lora")
        if self.rank < 1 or not self.alpha > 0:
            raise InvalidInput(f"lora: rank {self.rank}, alpha {self.alpha:g} given; expected at least 1, and above 0")
        if not self.targets:
            raise InvalidInput(f"lora-targets: none given; expected names of projections, or {ALL_LINEAR}")

    def trains(self, name: str) -> bool:
        """Whether a parameter of this name trains although it belongs to no adapter."""
        return is_within(name, self.full or ())

    def asks_for(self, planned: Lora | None) -> bool:
        """Whether a plan for those adapters is one for these; what nobody has said may be as it is there."""
        return planned is not None and planned == (replace(self, full=planned.full) if self.full is None else self)


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


def is_within(parameter: str, modules: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to a module whose name ends like one of these: peft's rule."""
    parts = parameter.split(".")
    return any(".".join(parts[:count]).endswith(modules) for count in range(1, len(parts)))


def stock_kind(name: str) -> str:
    """The kind of layer of the stock model that a fine-tuned one is of: ``decoder`` for ``decoder+frozen``."""
    return name.partition("+")[0]
