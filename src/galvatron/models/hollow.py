"""Copies of a model that take no memory: its structure and buffers, with parameters on the meta device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

__all__ = ["without_weights"]


def without_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """A copy whose parameters have shapes only (of ``dtype``, if given); those that are shared stay shared."""
    empty = {
        id(own): nn.Parameter(torch.empty_like(own, device="meta", dtype=dtype), requires_grad=own.requires_grad)
        for own in model.parameters()
    }
    return copy.deepcopy(model, empty)
