"""What a model is to the planner: a sequence of layers, each a handful of sizes.

Facts only, for one sample and one way of training (:class:`Training`); nothing here knows devices, strategies or costs.
All figures are whole numbers so that plans come out identical everywhere. Paper Section 3.1 (layers L_i with
parameters w_i and activations f_i) and 3.4 (memory "from the shape of a tensor and its data type").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from galvatron.core.errors import InvalidInput, OutOfRange
from galvatron.core.spec.figures import MOST_LAYERS, check_facts
from galvatron.core.spec.float8 import Float8
from galvatron.core.spec.layout import degree_of
from galvatron.core.spec.parts import Context, Experts, FusedLoss, Kept, TensorParallel
from galvatron.core.spec.strategy import Kind, Strategy
from galvatron.core.spec.training import DEFAULT_LONGEST, Attention, Precision, Training
from galvatron.core.spec.tuning import Tuning, stock_kind

__all__ = [
    "ALIGNED_BYTES",
    "DEFAULT_LONGEST",
    "LOSS_CHUNK_CELLS",
    "Attention",
    "Context",
    "Experts",
    "FusedLoss",
    "Kept",
    "LayerSpec",
    "ModelSpec",
    "Precision",
    "TensorParallel",
    "Training",
]


ALIGNED_BYTES = 16
"""Where rows of logits begin at other addresses than multiples of it, GPUs multiply slowly."""
LOSS_CHUNK_CELLS = 2**28
"""Logits that exist at a time where the loss is fused: 1 GiB of them in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer: what the search decides about. Sizes are for one sample; embeddings and heads are layers too."""

    name: str
    """Its kind: layers of one name are equal ("encoder", "decoder", "embedding", "head", "stage3" …)."""
    parameters: int
    tied_parameters: int = 0
    """Of these, the ones that belong to an earlier layer (a head tied to the embedding): they exist once where both
    layers are in one stage, and as a copy kept equal where they are not."""
    replicated_parameters: int = 0
    """Of these, the ones each tensor-parallel rank holds whole (norms, biases after a row split, positions)."""
    forward_flops: int
    """Operations of one forward pass, a multiply-add counted as two."""
    replicated_flops: int = 0
    """Of these, the ones that each tensor-parallel rank does (routers, attention over gathered heads)."""
    split_activation_bytes: int
    """Saved for backward and divided by tensor parallelism."""
    replicated_activation_bytes: int = 0
    """Saved for backward and whole on each tensor-parallel rank (sequence parallelism divides these too)."""
    boundary_bytes: int
    """What the layer hands to the next: moved by Slice-Gather and between stages, kept by recompute."""
    transient_bytes: int = 0
    """Largest working set of backward on top of what is saved (gradients of maps, logits); divided by TP."""
    tensor_parallel: TensorParallel | None = None
    """None: the layer cannot be split; under TP each rank computes it whole."""
    experts: Experts | None = None
    """None: a layer without experts."""
    tuning: Tuning | None = None
    """None: all of its parameters train, and it has no adapters."""
    fused_loss: FusedLoss | None = None
    """None: the layer has no loss that could be fused."""
    float8: Float8 | None = None
    """None: the layer has no linear layers that float8 pays for, or nobody asked."""
    selective: Kept | None = None
    """With selective recompute; None: there is nothing to select, or nobody knows."""
    but_attention: Kept | None = None
    """With recompute of all but attention; None: it has no fused attention, or nobody knows."""
    context: Context | None = None
    """None: its sequences cannot be divided over devices (windows, recurrences), or nobody knows whether."""

    def __post_init__(self) -> None:
        for part in (self, self.experts, self.tuning, self.fused_loss, self.float8, self.selective, self.but_attention):
            if part is not None:
                check_facts(part, f"layer {self.name!r}")
        for name in ("tied_parameters", "replicated_parameters"):
            if getattr(self, name) > self.parameters:
                raise OutOfRange(
                    f"layer {self.name!r}: {name} is {getattr(self, name)}; expected at most its parameters, "
                    f"{self.parameters}"
                )
        if self.experts is not None:
            self._check_experts(self.experts)

    def _check_experts(self, experts: Experts) -> None:
        apart = 0 if self.tensor_parallel is None else self.replicated_parameters
        for name, whole in (
            ("parameters", self.parameters - self.tied_parameters - apart),
            ("forward_flops", self.forward_flops),
            ("activation_bytes", self.split_activation_bytes),
            ("replicated_activation_bytes", self.replicated_activation_bytes),
        ):
            if not 0 <= getattr(experts, name) <= whole:
                raise OutOfRange(
                    f"layer {self.name!r}: experts.{name} is {getattr(experts, name)}; expected from 0 to {whole}, "
                    "for it is part of the layer's"
                )

    def to_dict(self) -> dict[str, Any]:
        """As plan files have it. What came later and is not used is left out: digests and files of those plans stay
        the same."""
        facts = asdict(self)
        if not self.replicated_flops:
            del facts["replicated_flops"]
        for name in ("experts", "float8", "fused_loss", "tuning", "selective", "but_attention", "context"):
            if facts[name] is None:
                del facts[name]
        if self.fused_loss is not None and not self.fused_loss.words:
            del facts["fused_loss"]["words"]
        return facts

    @property
    def trained_parameters(self) -> int:
        """Those that are not frozen."""
        return self.parameters - (self.tuning.frozen_parameters if self.tuning else 0)

    def untuned(self) -> LayerSpec:
        """The stock model's layer that it was made of."""
        if self.tuning is None:
            return self
        return replace(
            self,
            name=stock_kind(self.name),
            parameters=self.parameters - self.tuning.adapter_parameters,
            replicated_parameters=self.replicated_parameters - self.tuning.adapter_replicated_parameters,
            forward_flops=self.forward_flops - self.tuning.adapter_flops,
            replicated_activation_bytes=self.replicated_activation_bytes - self.tuning.adapter_activation_bytes,
            tuning=None,
        )

    def tuned(self, own: Tuning, name: str) -> LayerSpec:
        """The inverse: the layer with some of it frozen, and with adapters."""
        return replace(
            self,
            name=name,
            parameters=self.parameters + own.adapter_parameters,
            replicated_parameters=self.replicated_parameters + own.adapter_replicated_parameters,
            forward_flops=self.forward_flops + own.adapter_flops,
            replicated_activation_bytes=self.replicated_activation_bytes + own.adapter_activation_bytes,
            tuning=own,
        )

    @property
    def activation_bytes(self) -> int:
        """All that one sample saves for backward on a single device."""
        return self.split_activation_bytes + self.replicated_activation_bytes

    def allows_tensor_parallel(self, degree: int) -> bool:
        """Whether the degree divides the heads (a layer that cannot be split is computed whole, so any degree goes)."""
        return self.tensor_parallel is None or all(count % degree == 0 for count in self.tensor_parallel.divides)

    def allows_sequence_parallel(self, degree: int) -> bool:
        """Whether the layer has sequences to divide, and the degree divides their lengths."""
        lengths = self.tensor_parallel.sequence_divides if self.tensor_parallel else ()
        return bool(lengths) and all(length % degree == 0 for length in lengths)

    def allows_context(self, strategy: Strategy) -> bool:
        """Whether sequences of the layer can be divided as the strategy says. Without context axes any layer goes."""
        return self.context_problem(strategy) is None

    def context_problem(self, strategy: Strategy) -> str | None:
        """Why they cannot; None: they can."""
        if strategy.context_degree == 1:
            return None
        if self.context is None:
            return "its sequences cannot be divided over devices; 'galvatron check MODEL' says why"
        return self.context.problem(strategy)

    def supports(self, strategy: Strategy) -> bool:
        """Whether the layer can have the strategy's switches, and its experts their axes."""
        return (
            self.allows_experts(strategy)
            and (not strategy.fused_loss or self.fused_loss is not None)
            and (not strategy.float8 or self.float8 is not None)
            and self.allows_grade(strategy)
        )

    def allows_grade(self, strategy: Strategy) -> bool:
        """Whether the layer can be recomputed in part, or offloaded, as the strategy says. Only layers of which some
        results can be kept are offloaded: others have little to offload. What experts with axes of their own keep is
        not known."""
        if not strategy.graded:
            return True
        facts = self.but_attention if strategy.recompute_but_attention else self.selective
        return facts is not None and not strategy.experts

    def allows_experts(self, strategy: Strategy) -> bool:
        """Whether the axes of a strategy's experts divide the layer's experts; without such axes any layer goes. TP
        ranks of experts have the same tokens, so it does not go with sequence parallelism."""
        if not strategy.experts:
            return True
        if self.experts is None or self.experts.count % degree_of(strategy.expert_factors(Kind.EP)):
            return False
        tensor = degree_of(strategy.expert_factors(Kind.TP))
        if tensor > 1 and strategy.sequence_parallel:
            return False
        return all(width % tensor == 0 for width in self.experts.divides)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: its layers in order, and how it is trained."""

    name: str
    family: str
    """Architecture family ("bert", "t5" …), the adapter that will run it; "custom" for a user's own layers."""
    layers: tuple[LayerSpec, ...]
    training: Training
    config: Mapping[str, Any] | None = field(default=None, compare=False)
    """The Hugging Face configuration that builds it, as JSON; None for a model described by figures alone. No part of
    what the planner sees, so neither of comparisons nor of the digest."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise InvalidInput(f"model {self.name!r}: it has no layers; a model needs at least one")
        if len(self.layers) > MOST_LAYERS:
            raise InvalidInput(f"model {self.name!r}: it has {len(self.layers)} layers; expected at most {MOST_LAYERS}")
        check_facts(self, f"model {self.name!r}")
        kinds: dict[str, LayerSpec] = {}
        for layer in self.layers:
            if kinds.setdefault(layer.name, layer) != layer:
                raise InvalidInput(f"model {self.name!r}: two different layers are both named {layer.name!r}")

    def attends(self, strategy: Strategy) -> bool:
        """Whether some layer with attention can take the context axes: others need no more than those (rule
        context-2)."""
        attending = (kind for kind in self.kinds if kind.context is not None and kind.context.heads)
        return strategy.context_degree == 1 or any(kind.allows_context(strategy) for kind in attending)

    def allows(self, kind: LayerSpec, strategy: Strategy) -> bool:
        """Whether a strategy can run a kind of layer."""
        return self.divides(kind, strategy) and kind.supports(strategy)

    def divides(self, kind: LayerSpec, strategy: Strategy) -> bool:
        """Whether TP, sequence parallelism and context parallelism of a strategy can divide a kind of layer. Only their
        degrees matter.

        TP ranks compute a layer that cannot be split whole, each for itself. That is of use between layers that are
        split, so a model of which nothing can be split has no TP; and a tied weight would need its gradient summed
        over those ranks as well, so a layer that shares one is split or has no TP.
        """
        degree = strategy.degree(Kind.TP)
        if degree > 1 and kind.tensor_parallel is None and (kind.name in self._sharing or not self.splittable):
            return False
        return (
            kind.allows_tensor_parallel(degree)
            and (not strategy.sequence_parallel or kind.allows_sequence_parallel(degree))
            and kind.allows_context(strategy)
        )

    @cached_property
    def has_experts(self) -> bool:
        """Whether any of its layers has experts."""
        return any(kind.experts is not None for kind in self.kinds)

    @cached_property
    def divisible(self) -> bool:
        """Whether sequences of any of its layers with attention can be divided over devices."""
        return any(kind.context is not None and kind.context.heads for kind in self.kinds)

    @cached_property
    def splittable(self) -> bool:
        """Whether TP can split any of its layers."""
        return any(kind.tensor_parallel is not None for kind in self.kinds)

    @cached_property
    def _sharing(self) -> frozenset[str]:
        """Kinds that share a tied weight: those tied to an earlier layer, and the first layer, which owns it."""
        users = {kind.name for kind in self.kinds if kind.tied_parameters}
        return frozenset({*users, self.layers[0].name} if users else ())

    def untuned(self) -> ModelSpec:
        """The stock model: nothing frozen, nothing added."""
        layers = tuple(layer.untuned() for layer in self.layers)
        return replace(self, layers=layers, training=self.training.untuned())

    @cached_property
    def undivided(self) -> ModelSpec:
        """The same without what is known of dividing its sequences, which is no part of what it computes."""
        kinds = {kind.name: replace(kind, context=None) for kind in self.kinds}
        return replace(self, layers=tuple(kinds[layer.name] for layer in self.layers))

    @cached_property
    def parameters(self) -> int:
        """All parameters, tied ones counted once."""
        return sum(layer.parameters - layer.tied_parameters for layer in self.layers)

    @cached_property
    def trained_parameters(self) -> int:
        """Those that are not frozen, tied ones counted once."""
        tied = (
            layer.tied_parameters - (layer.tuning.frozen_tied_parameters if layer.tuning else 0)
            for layer in self.layers
        )
        return sum(layer.trained_parameters for layer in self.layers) - sum(tied)

    @cached_property
    def activation_bytes(self) -> int:
        """What one sample saves for backward over all layers."""
        return sum(layer.activation_bytes for layer in self.layers)

    @cached_property
    def forward_flops(self) -> int:
        return sum(layer.forward_flops for layer in self.layers)

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The distinct layers, in order of first appearance."""
        return tuple({layer.name: layer for layer in self.layers}.values())

    @cached_property
    def digest(self) -> str:
        """Identifies layers and training, whatever file or preset they came from."""
        facts = {
            "family": self.family,
            "kinds": [kind.to_dict() for kind in self.undivided.kinds],
            "order": [layer.name for layer in self.layers],
            "training": self.training.to_dict(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def layers_digest(self) -> str:
        """Identifies what a profile measures: kinds of layer and how they compute, whatever their number and order, and
        whatever of them is frozen."""
        stock = self.untuned().undivided
        balanced = (
            kind if kind.experts is None else replace(kind, experts=replace(kind.experts, imbalance=1.0))
            for kind in stock.kinds
        )
        kinds = [kind.to_dict() for kind in balanced]
        for kind in kinds:  # figures that came later than the first profiles, and follow from others
            kind.get("fused_loss", {}).pop("words", None)
            if stock.family != "generic":
                kind.pop("replicated_flops", None)
        dropout = []
        if stock.training.compile and stock.family == "generic":
            # Traced: versions of PyTorch differ in what a compiler makes again. Of dropout nothing else may tell.
            dropout = [stock.training.dropout]
            for kind in kinds:
                del kind["split_activation_bytes"], kind["replicated_activation_bytes"]
        facts = {
            "kinds": sorted(kinds, key=lambda kind: str(kind["name"])),
            "training": [stock.training.precision, stock.training.attention, stock.training.compile, *dropout],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
