"""Which adapter cuts a model: by its stock class, else the generic one."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from galvatron.families.discovery import families
from galvatron.families.generic.adapter import Generic, LossFunction
from galvatron.families.given import refuse_left_out, refuse_shared
from galvatron.families.layer import Batch, LayeredModel

__all__ = ["in_family", "layered_model"]


def layered_model(
    model: nn.Module, batch: Batch | None = None, loss: LossFunction | None = None, *, generic: bool = False
) -> LayeredModel:
    """The model as layers, which hold the model's own modules.

    ``generic``: as one of no family, whatever it is: so it was described.
    For a model of no family: ``batch`` is an example of what it takes (Hugging Face's models need none), ``loss`` makes
    of its output and the batch the loss, summed over the targets (default: cross-entropy of the logits).
    """
    adapter = None if generic else _adapter(type(model))
    if adapter is None or loss is not None:
        return Generic(model, batch, loss)
    layered = adapter(model)
    refuse_shared(layered)
    refuse_left_out(layered)
    return layered


def in_family(model: nn.Module) -> bool:
    """Whether a family knows models of this class."""
    return _adapter(type(model)) is not None


def _adapter(stock: type[nn.Module]) -> type[LayeredModel] | None:
    """The adapter of the family whose head class this is. Only its module is imported."""
    if not stock.__module__.startswith("transformers."):
        return None
    for folder, family in families().items():
        if family.head_class == stock.__name__:
            adapter: type[LayeredModel] = import_module(f"galvatron.families.{folder}.adapter").ADAPTER
            return adapter
    return None
