"""A user's model in memory, as its class made it: without what was wrapped around it, and which our layers would lose.

What the plan decides (which layers are recomputed or compiled) is taken off with a warning. What training would ignore
(another loss, hooks on parameters, forwards that belong to other modules) is refused.
"""

from __future__ import annotations

import copy
import logging
import sys
from types import MethodType
from typing import Any

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import LayeredModel, shared_weights

__all__ = [
    "LIBRARIES",
    "as_stock",
    "has_hooks",
    "keep_in_evaluation",
    "own_forward",
    "refuse_left_out",
    "refuse_own_loss",
    "refuse_shared",
    "replaced_forward",
]

_LOG = logging.getLogger(__name__)
_EMBEDDING_OPTIONS = (
    ("max_norm", "changes its weight in forward, on each rank for its own rows", None),
    ("scale_grad_by_freq", "counts the rows of a whole batch, of which each rank has its own", False),
    ("sparse", "makes gradients that ranks cannot sum", False),
)
LIBRARIES = ("torch.", "transformers.", "peft.", "liger_kernel.")
"""Whose modules compute what they say, those of the last one as those whose place they take."""
_INPUT_GRADIENTS = "enable_input_require_grads"
"""The method of transformers whose hook lets embeddings have gradients, for the sake of its own recompute alone."""


def as_stock(model: nn.Module) -> nn.Module:
    """The model itself, or, where it was compiled or is to recompute by itself, a copy with the same weights that was
    not and does not."""
    _refuse_parameter_hooks(model)
    _refuse_foreign_forwards(model)
    _refuse_embedding_options(model)
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


def _refuse_foreign_forwards(model: nn.Module) -> None:
    """A method of the module itself goes where a copy of it goes; what else was put in its forward's place does not."""
    for name, own in model.named_modules():
        forward = vars(own).get("forward")
        if forward is None or getattr(forward, "__self__", None) is own or _inside(own) is not own:
            continue
        remedy = "make it a method of the module's class, or of the module (types.MethodType(function, module))"
        if hasattr(own, "_hf_hook"):
            remedy = "load it without device_map, or call accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        raise InvalidInput(
            f"model: the forward of {name or type(own).__name__} was replaced by "
            f"{getattr(forward, '__qualname__', type(forward).__name__)}, which computes with the weights it was made "
            f"with, while ranks have parts and copies of them; {remedy}"
        )


def _refuse_embedding_options(model: nn.Module) -> None:
    for name, own in model.named_modules():
        if not isinstance(own, nn.Embedding | nn.EmbeddingBag):
            continue
        for option, effect, off in _EMBEDDING_OPTIONS:
            if getattr(own, option, None):
                raise InvalidInput(f"model: {option} of {name} {effect}; set it to {off}")


def keep_in_evaluation(model: nn.Module) -> None:
    """Let the parts of a model in training mode that are in evaluation mode (a frozen tower, say) stay so."""
    if model.training:
        for own in model.modules():
            if not own.training:
                vars(own)["train"] = MethodType(_stay, own)  # which a copy takes along


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    module.training = False
    for own in module.children():
        own.train(mode)
    return module


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of the user's, which are lost if another takes its place. Those with which
    transformers collects outputs do nothing in training."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own = (hook for each in hooks for hook in each.values())
    return any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in own)


def own_forward(module: nn.Module) -> str | None:
    """What computes a projection or embedding, in words, if it is not what its library made: it is lost if another
    module takes its place."""
    if replaced_forward(module):
        return "a forward of its own"
    if not isinstance(getattr(module, "weight", None), nn.Parameter):
        return f"a class of its own ({type(module).__qualname__})"
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return None if owner.__module__.startswith(LIBRARIES) else f"the forward of {owner.__qualname__}"


def replaced_forward(module: nn.Module) -> bool:
    """Whether someone put a function in the place of the module's forward, or of its class's."""
    if "forward" in vars(module):
        return not str(getattr(vars(module)["forward"], "__module__", "")).startswith(LIBRARIES)
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    where = getattr(vars(owner)["forward"], "__module__", owner.__module__)
    return owner.__module__.startswith(LIBRARIES) and not where.startswith(LIBRARIES)


def refuse_left_out(layered: LayeredModel) -> None:
    """Raise :class:`InvalidInput` if a model of a known family has a parameter that is in none of its layers."""
    held = {own for layer in layered.layers for own in layer.parameters()}
    named = ((name, own) for name, own in layered.model.named_parameters() if name not in layered.unused)
    left = next((name for name, own in named if own not in held), None)
    if left is not None:
        raise InvalidInput(
            f"{type(layered.model).__name__}: {left} is in none of its layers, because models of this class have no "
            "such weight; plan the model as it is, with galvatron.plan(galvatron.describe(model, batch), …)"
        )


def refuse_shared(layered: LayeredModel) -> None:
    """Raise :class:`InvalidInput` if layers of a known family share weights that its models do not: each layer would
    train its own."""
    known = {use for tie in layered.ties for use in tie.uses}
    for tie in shared_weights(layered.layers):
        if not known.issuperset(tie.uses):
            first, second, *_ = (layered.layers[use.layer].stock_name(use.name) for use in tie.uses)
            raise InvalidInput(
                f"{type(layered.model).__name__}: {first} and {second} are one weight, which models of this class do "
                "not have in common; plan the model as it is, with galvatron.plan(galvatron.describe(model, batch), …)"
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
