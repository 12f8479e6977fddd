"""Linear layers in float8, through torchao: products of inputs, weights and gradients that are cast as they are needed.

Masters, gradients, saved inputs and all communication stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.float8 import float8_pays
from galvatron.families.layer import Layer

__all__ = ["check_float8", "has_float8", "to_float8"]

_RECIPE = "rowwise"
_ADA = (8, 9)


def has_float8(device: torch.device) -> bool:
    """Whether a device multiplies in float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _ADA


def check_float8(device: torch.device) -> None:
    """Refuse where torchao or the hardware is missing. A CPU emulates it, slowly and with the same numbers."""
    if find_spec("torchao") is None:
        raise InvalidInput("float8: planned, but torchao is not installed; pip install 'galvatron[float8]'")
    if device.type == "cuda" and not has_float8(device):
        name = torch.cuda.get_device_name(device)
        raise InvalidInput(
            f"float8: planned, but {name!r} has none (NVIDIA GPUs have it from compute capability 8.9 on); plan "
            "without --float8"
        )


def to_float8(layer: Layer, device: torch.device) -> None:
    """Let those of a layer's linear layers compute in float8 for which it pays."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config: Any = Float8LinearConfig.from_recipe_name(_RECIPE)
    config = replace(config, emulate=device.type != "cuda")
    found = [
        (path, module)
        for path, module in layer.named_modules()
        if type(module) is nn.Linear and float8_pays(module.in_features, module.out_features)
    ]
    if not found:
        raise InvalidInput(f"float8: planned for layer {layer.kind!r}, which has no linear layers that it pays for")
    for path, module in found:
        layer.replace_module(path, Float8Linear.from_float(module, config))
