"""Where a model's weights come from at the start, one layer at a time, so that nobody ever holds the whole model.

Each source is made from the cut model before anything is split or placed, and keeps only names and shapes of it. It
then gives any layer's whole tensors, in fp32 on the CPU, whatever became of the model in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from galvatron.errors import InvalidInput
from galvatron.models.initial import InitialWeights
from galvatron.models.layer import CutModel
from galvatron.models.names import parameters_of
from galvatron.models.saved import SavedWeights

__all__ = ["InitialWeights", "ModelWeights", "SavedWeights", "Weights"]


class Weights(Protocol):
    """A source of weights."""

    def tensors(self, index: int) -> dict[str, Tensor]:
        """The whole tensors of a layer by the names of its parameters, tied ones included."""


class ModelWeights:
    """From a stock model in memory: the one that was cut, or another of the same shape."""

    def __init__(self, cut_model: CutModel, model: nn.Module | None = None) -> None:
        self._layers = parameters_of(cut_model)
        source = cut_model.model if model is None else model
        self._tensors = {name: own.detach() for name, own in source.named_parameters(remove_duplicate=False)}
        for parameter in (own for layer in self._layers for own in layer):
            found = _first(self._tensors, parameter.aliases)
            if found is None or found.is_meta or found.shape != parameter.shape:
                given = "missing" if found is None else "without values" if found.is_meta else tuple(found.shape)
                raise InvalidInput(
                    f"{type(source).__name__} in memory: {parameter.aliases[0]} is {given}; "
                    f"expected a tensor of shape {tuple(parameter.shape)}"
                )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All that layers will be given, by stock names, tied ones once."""
        for own in dict.fromkeys(own.aliases for layer in self._layers for own in layer):
            found = _first(self._tensors, own)
            if found is not None:
                yield own[0], found

    def tensors(self, index: int) -> dict[str, Tensor]:
        found = {own.name: _first(self._tensors, own.aliases) for own in self._layers[index]}
        return {name: tensor.to("cpu", torch.float32) for name, tensor in found.items() if tensor is not None}


def _first(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor | None:
    return next((tensors[name] for name in names if name in tensors), None)
