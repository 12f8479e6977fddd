"""Weights that cost nothing: random numbers of a small pool, seen again and again through overlapping windows.

Neither memory nor time depends on the model's size, and numbers stay in the range of a fresh model's, so that
computing with them is as fast as with real ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from galvatron.families.layer import LayeredModel
from galvatron.families.weights import parameters_of

__all__ = ["CheapWeights"]

_SPREAD = 0.02


class CheapWeights:
    """Row i, column j of a matrix is number 2i + j of the pool; vectors (norms, biases) are about one."""

    def __init__(self, layered: LayeredModel) -> None:
        self._layers = parameters_of(layered)
        shapes = [own.shape for layer in self._layers for own in layer]
        longest = max(_reach(shape) for shape in shapes)
        self._matrices = torch.randn(longest, generator=torch.Generator().manual_seed(0)) * _SPREAD
        self._vectors = self._matrices + 1

    def tensors(self, index: int) -> dict[str, Tensor]:
        return {own.name: self._tensor(own.shape) for own in self._layers[index]}

    def _tensor(self, shape: torch.Size) -> Tensor:
        pool = self._vectors if len(shape) < 2 else self._matrices
        return pool.as_strided(shape, _strides(shape))


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Ascending towards the front, so that a copy comes out in rows as usual."""
    return tuple(range(len(shape), 0, -1))


def _reach(shape: torch.Size) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, _strides(shape), strict=True))
