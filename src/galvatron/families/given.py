"""A user's model in memory, as its class made it: without what was wrapped around it, and which our layers would lose.

What the plan decides (which layers are recomputed or compiled) is taken off with a warning. What training would ignore
(another loss, hooks on parameters) is refused.
"""

from __future__ import annotations

import copy
import logging
import sys
from typing import Any

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING

from galvatron.core.errors import InvalidInput

__all__ = ["as_stock", "has_hooks", "refuse_own_loss", "refuse_replaced"]

_LOG = logging.getLogger(__name__)
_INPUT_GRADIENTS = "enable_input_require_grads"
"""The method of transformers whose hook lets embeddings have gradients, for the sake of its own recompute alone."""


def as_stock(model: nn.Module) -> nn.Module:
    """The model itself, or, where it was compiled or is to recompute by itself, a copy with the same weights that was
    not and does not."""
    _refuse_parameter_hooks(model)
    modules = list(model.modules())
    compiled = any(_inside(own) is not own or own._compiled_call_impl is not None for own in modules)
    recomputed = any(getattr(own, "gradient_checkpointing", False) is True for own in modules)
    if compiled:
        _LOG.warning(
            "model: was compiled (torch.compile), which is left out: layers are compiled if the plan says so "
            "(compile=True)"
        )
    if recomputed:
        _LOG.warning(
            "model: gradient_checkpointing_enable() was called, which is left out: the plan says which layers are "
            "recomputed (+rc)"
        )
    if not (compiled or recomputed or any(_input_hooks(own) for own in modules)):
        return model
    shared = {id(own): own for own in (*model.parameters(), *model.buffers())}
    plain = _inside(copy.deepcopy(model, shared))
    for own in list(plain.modules()):
        own._modules.update({name: _inside(child) for name, child in own._modules.items() if child is not None})
    for own in plain.modules():
        own._compiled_call_impl = None
        if getattr(own, "gradient_checkpointing", False) is True:
            vars(own)["gradient_checkpointing"] = False
        for key in _input_hooks(own):
            del own._forward_hooks[key]
    return plain


def _inside(module: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given; any other module itself."""
    loaded = sys.modules.get("torch._dynamo.eval_frame")  # which takes long to import, and nobody has compiled before
    if loaded is None or not isinstance(module, loaded.OptimizedModule):
        return module
    inside: nn.Module = module._orig_mod
    return inside


def _input_hooks(module: nn.Module) -> list[int]:
    return [key for key, hook in module._forward_hooks.items() if _INPUT_GRADIENTS in getattr(hook, "__qualname__", "")]


def _refuse_parameter_hooks(model: nn.Module) -> None:
    for name, own in model.named_parameters():
        if own._backward_hooks or own._post_accumulate_grad_hooks:
            raise InvalidInput(
                f"model: its parameter {name} has a hook, which would not run: ranks hold other tensors; remove it, "
                "and look at gradients after forward_backward (model.named_parameters(), model.whole_gradients())"
            )


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of the user's, which are lost if another takes its place."""
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def refuse_replaced(model: nn.Module) -> None:
    """Raise :class:`InvalidInput` if a model of a known family has a forward of its own."""
    if "forward" in vars(model):
        raise InvalidInput(
            f"{type(model).__name__}: its forward was replaced, which layers do not call; make a class of your own, "
            "describe it (galvatron.describe) and plan for that"
        )


def refuse_own_loss(model: Any, usual: str) -> None:
    """Raise :class:`InvalidInput` if the model computes another loss than its class does, ``usual`` in transformers'
    words."""
    if model.loss_function is not LOSS_MAPPING[usual]:
        called = getattr(model.loss_function, "__qualname__", type(model.loss_function).__name__)
        raise InvalidInput(
            f"{type(model).__name__}: its loss_function is {called}, which layers do not call; describe the model "
            "(galvatron.describe), plan for that, and give parallelize a loss that is summed over the targets (loss=)"
        )
