"""The contract between a family of models and the runtime: a stock model cut into layers.

A family's adapter (its ``adapter.py``) cuts a stock Hugging Face model into :class:`Layer` modules in the
order and with the kinds of the planner's :class:`galvatron.core.spec.ModelSpec`. Knows nothing of ranks or strategies.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron.families.rules import DividedExperts, Rule

__all__ = [
    "IGNORED",
    "Activations",
    "Batch",
    "CrossEntropy",
    "Layer",
    "LayeredModel",
    "Tie",
    "Use",
    "shared_weights",
]

Activations = tuple[Tensor, ...]
"""What travels from layer to layer, rows (samples) first in each tensor. Empty before the first layer."""
Batch = Mapping[str, Tensor]
"""Inputs and labels by Hugging Face's names, rows first in each tensor."""

IGNORED = -100
"""The label of positions that do not count."""


def _alone(own: Tensor) -> Tensor:
    return own


class CrossEntropy(nn.Module):
    """Sum over the targets of the negative log-probability, in fp32; ignored targets add nothing."""

    smoothing: float = 0.0
    """Share of each target that all words have in equal parts."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return functional.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class Layer(nn.Module, ABC):
    """One layer of a cut model: stock modules under attribute names, and how to call them.

    The last layer returns one scalar: the loss *summed* over the targets of its rows. It may return a second one: its
    rows' part of a term that each micro-batch has once, whatever its targets; the loss has the mean over micro-batches.
    """

    def __init__(self, kind: str, modules: Mapping[str, tuple[str, nn.Module]], rules: tuple[Rule, ...] = ()) -> None:
        """``modules``: attribute name to (its name in the stock model, the stock module)."""
        super().__init__()
        self.kind = kind
        """Name of the layer in the planner's model ("encoder", "head" …)."""
        self.rules = rules
        """How tensor parallelism splits it; empty: each tensor-parallel rank computes it whole."""
        self.experts: DividedExperts | None = None
        """What expert parallelism divides; None: nothing."""
        self.over_rows: Callable[[Tensor], Tensor] = _alone
        """The sum of a tensor without gradient over the ranks that have the other rows of the micro-batch. The runtime
        sets it, for the last layer alone."""
        self.projection: str | None = None
        """Of a head: the module whose outputs, the logits, go into ``loss`` and nowhere else, so that the two can be
        fused; None: they cannot."""
        self._stock_names = {attribute: name for attribute, (name, _) in modules.items()}
        for attribute, (_, module) in modules.items():
            self.add_module(attribute, module)

    @property
    def inputs(self) -> frozenset[str]:
        """Tensors of the batch that the layer's forward reads, itself or through the context."""
        return frozenset()

    @abstractmethod
    def forward(self, activations: Activations, context: Any) -> Activations:
        """Run on some rows; ``context`` is what :meth:`LayeredModel.context` made of the same rows of the batch."""

    def detached(self) -> Layer:
        """The layer with modules of its own, to be split and filled: stock models share some between layers."""
        return copy.deepcopy(self)

    def replace_module(self, path: str, module: nn.Module) -> None:
        """Put another module in the place of one of the layer's."""
        owner, _, name = path.rpartition(".")
        setattr(self.get_submodule(owner), name, module)

    def caller(self, path: str) -> nn.Module:
        """The module whose forward uses the weights of the one with this path: itself."""
        return self.get_submodule(path)

    def drawing_modules(self) -> Iterator[nn.Module]:
        """All modules that its forward runs: some may draw random numbers."""
        return self.modules()

    def stock_name(self, name: str) -> str:
        """The stock model's name of a parameter or buffer: ``"block.output.dense.weight"`` to ``"bert.encoder…"``."""
        attribute, _, rest = name.partition(".")
        stock = self._stock_names[attribute]
        return f"{stock}.{rest}" if stock else rest

    @property
    def stock_modules(self) -> tuple[str, ...]:
        """The stock model's names of the modules that it has, with all that is in them."""
        return tuple(self._stock_names.values())

    def name_of_module(self, stock: str) -> str | None:
        """The name in the layer of a module that the stock model knows by this one; None: the layer has none."""
        for attribute, name in self._stock_names.items():
            if stock == name or stock.startswith(f"{name}."):
                return attribute + stock[len(name) :]
        return None

    def stock_parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """(name in the layer, name in the stock model, parameter), in order."""
        for name, parameter in self.named_parameters():
            yield name, self.stock_name(name), parameter

    def stock_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the stock model, buffer), as the layer uses them."""
        for name, buffer in self.named_buffers(remove_duplicate=False):
            yield self.stock_name(name), buffer


@dataclass(frozen=True, slots=True)
class Use:
    """A parameter of a layer."""

    layer: int
    name: str
    """Its name in the layer."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A weight that several layers use. The first use owns it: its stock name is the one in checkpoints."""

    uses: tuple[Use, ...]
    small: bool = False
    """Small enough to be whole on each rank (a table of position biases); else split along its first dim."""


def shared_weights(layers: Iterable[Layer]) -> tuple[Tie, ...]:
    """The weights that several layers use."""
    uses: dict[nn.Parameter, list[Use]] = {}
    for index, layer in enumerate(layers):
        for name, own in layer.named_parameters():
            uses.setdefault(own, []).append(Use(index, name))
    return tuple(Tie(tuple(places)) for places in uses.values() if len(places) > 1)


class LayeredModel(ABC):
    """A stock model cut into layers."""

    layers: tuple[Layer, ...]
    ties: tuple[Tie, ...] = ()
    required: frozenset[str] = frozenset({"labels"})
    """Names that every batch must have."""
    shifts_labels: bool = False
    """Whether the target of a token is the label of the next one."""
    wide_activations: int = 0
    """How many activations, the last ones, are sums over tokens: in fp32 at least, whatever layers compute in, and of
    whole samples, so that no sequence may be divided."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """The stock model the layers were taken from; knows how its weights are initialised."""

    shared_modules: tuple[str, ...] = ()
    """Names of modules of the stock model that :meth:`context` calls."""
    unused: tuple[str, ...] = ()
    """Names of parameters of the stock model that nothing uses, and that are in no layer."""
    stand_ins: tuple[str, ...] = ()
    """Names of those that layers call in the place of others, with the same weights."""

    def why_undivided(self, index: int) -> str | None:
        """Why context parallelism cannot divide the sequences of a layer; None: it can. Then its layers take positions
        and targets from the batch they are given, because it holds a part of each sequence."""
        return f"{type(self.model).__name__} has no sequence of tokens that attend to each other alone"

    def separates_documents(self) -> bool:
        """Whether positions that start anew in a row mean another document, to whose tokens nothing attends: so do
        transformers' causal models, where nothing else masks; its encoders do not."""
        return False

    @property
    def first_trained(self) -> int:
        """The first layer with a parameter that is not frozen: no gradient reaches those before it."""
        places = (
            place for place, own in enumerate(self.layers) if any(each.requires_grad for each in own.parameters())
        )
        return next(places, len(self.layers))

    def calling_modules(self) -> Iterator[nn.Module]:
        """All that :meth:`context` may call."""
        return self.model.modules()

    def shared_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the stock model, buffer) of those that :meth:`context` uses, where these are copies."""
        return iter(())

    def by_rows(self, batch: Batch) -> Batch:
        """A user's batch with rows first in each tensor: some models take lists of images or patches."""
        return batch

    @abstractmethod
    def context(self, batch: Batch, dtype: torch.dtype) -> Any:
        """What the layers of a stage share for some rows (masks, positions), made once for each micro-batch.

        ``batch`` holds at least the inputs of the layers that will read the context; ``dtype`` is that of activations.
        """

    @abstractmethod
    def carried(self, index: int, samples: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Shapes, for one sample, of the activations that enter a layer; ``samples``: those of the batch's tensors."""

    @abstractmethod
    def targets(self, batch: Batch) -> int:
        """How many targets the whole batch has; the loss is divided by it."""

    @abstractmethod
    def example(self, rows: int, sequence_length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
        """A random batch to train on: every input and label the model needs, for so many samples."""
