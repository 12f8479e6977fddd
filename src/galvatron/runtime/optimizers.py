"""PyTorch's classes for the optimizers that plans name (:mod:`galvatron.core.spec.optimizer`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from galvatron.core.spec import OPTIMIZERS, OptimizerSpec

__all__ = ["has_fused", "torch_class"]


def torch_class(spec: OptimizerSpec) -> Callable[..., Optimizer]:
    """The one that trains."""
    kind: Callable[..., Optimizer] = _class(spec.torch_classes[0])
    return kind


def has_fused(kind: Callable[..., Optimizer]) -> bool:
    """Whether PyTorch has fused kernels for this class on every device."""
    return any(kind is _class(name) for spec in OPTIMIZERS if spec.fused for name in spec.torch_classes)


def _class(name: str) -> Any:
    return getattr(torch.optim, name)
