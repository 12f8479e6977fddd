"""Who a layer's parameters are in the stock model: what every source of weights goes by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from galvatron.models.layer import CutModel

__all__ = ["Parameter", "parameters_of"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a layer: who it is in the stock model."""

    name: str
    """In the layer."""
    aliases: tuple[str, ...]
    """In the stock model; a tied one has several, and checkpoints hold it under the first."""
    shape: torch.Size


def parameters_of(cut_model: CutModel) -> tuple[tuple[Parameter, ...], ...]:
    """The parameters of each layer."""
    names: dict[nn.Parameter, list[str]] = {}
    for stock_name, parameter in cut_model.model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(stock_name)
    return tuple(
        tuple(Parameter(name, tuple(names[own]), own.shape) for name, own in layer.named_parameters())
        for layer in cut_model.layers
    )
