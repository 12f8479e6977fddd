"""Whether a model's buffers must have the type that it computes in, as ``model.to(torch.bfloat16)`` gives it to them.

Most models want theirs as they are, in fp32: frequencies of rotary positions and biases of routers lose too much
otherwise. Some multiply them by what has another type then, or add them to it (tables of positions, masks), which
PyTorch refuses. A small copy of the model shows it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import GalvatronError
from galvatron.core.spec import Training
from galvatron.families.build import without_weights
from galvatron.families.generic.adapter import Generic
from galvatron.families.layer import Batch, LayeredModel
from galvatron.families.registry import layered_model
from galvatron.runtime.trial import NotChecked, own_loss, tiny_copy, trial_batches

__all__ = ["buffers_follow", "to_type"]

_TRIAL = (2, 16)
"""Samples and tokens."""
_ROTATIONS = "inv_freq"
_KNOWN: dict[tuple[type[nn.Module], str, torch.dtype], bool] = {}
"""By class, configuration and type."""


def buffers_follow(layered: LayeredModel, dtype: torch.dtype) -> bool:
    """Whether they must, for this type of activations and parameters."""
    model: Any = layered.model
    stock = isinstance(layered, Generic) and type(model).__module__.startswith("transformers.")
    if not stock or dtype == torch.float32 or not any(True for _ in _wide(model.modules())):
        return False
    known = type(model), model.config.to_json_string(use_diff=False), dtype
    if known not in _KNOWN:
        _KNOWN[known] = _must_follow(model, dtype)
    return _KNOWN[known]


def to_type(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Give the buffers of these modules this type, but for frequencies of rotary positions."""
    for owner, key, own in list(_wide(modules)):
        owner._buffers[key] = own.to(dtype)


def _wide(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in modules:
        for key, own in owner._buffers.items():
            if own is not None and own.dtype == torch.float32 and _ROTATIONS not in key:
                yield owner, key, own


def _must_follow(model: Any, dtype: torch.dtype) -> bool:
    with torch.random.fork_rng(devices=[]):
        try:
            tiny = tiny_copy(model, 1, Training(dropout=False))
            batch = trial_batches(layered_model(without_weights(tiny)), tiny, _TRIAL)["plain"]
        except (NotChecked, GalvatronError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError):
            return False  # then nobody knows, and they stay as they are
        for own in tiny.parameters():
            own.data = own.data.to(dtype)
        narrow = copy.deepcopy(tiny)
        to_type(narrow.modules(), dtype)
        batch = {name: own.to(dtype) if own.is_floating_point() else own for name, own in batch.items()}
        return not _computes(tiny, batch) and _computes(narrow, batch)


@torch.no_grad()
def _computes(model: nn.Module, batch: Batch) -> bool:
    try:
        own_loss(model, batch, None)
    except RuntimeError:
        return False
    return True
