"""What of a stock model in memory is not as its class made it: modules of other classes, forwards of their own, hooks.

Layers of a known family call some of its modules and no others, and tensor parallelism gives modules a part of the
features: what people changed there would be left out, or see something else than in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from galvatron.core.errors import InvalidInput
from galvatron.families.build import bare, without_weights
from galvatron.families.generic.adapter import Generic
from galvatron.families.given import LIBRARIES, has_hooks, replaced_forward
from galvatron.families.layer import Layer, LayeredModel
from galvatron.families.lora import is_adapter, plain_name
from galvatron.families.registry import in_family, layered_model
from galvatron.families.rules import Columns, Region, Rows

__all__ = ["altered_modules", "check_called", "check_known", "check_split"]

_ACTIVATIONS = ("activation", "activations", "dropout")
"""Modules of torch.nn and of transformers."""
_MIXING = frozenset({"GLU", "LogSoftmax", "MultiheadAttention", "PReLU", "Softmax", "Softmax2d", "Softmin"})
_DESCRIBE = "plan the model as it is, with galvatron.plan(galvatron.describe(model, batch), …)"


def altered_modules(model: nn.Module) -> dict[str, str]:
    """By name, in words; of Hugging Face's models alone. Adapters do not count."""
    if not type(model).__module__.startswith("transformers."):
        return {}
    stock = bare(model)
    if stock is None:
        return {}
    kinds = {name: type(own) for name, own in stock.named_modules(remove_duplicate=False)}
    adapted = tuple(f"{name}." for name, own in model.named_modules() if type(own).__module__.startswith("peft."))
    found = {}
    for name, own in model.named_modules(remove_duplicate=False):
        kind, plain = type(own), name.removesuffix(".base_layer")
        peft = kind.__module__.startswith("peft.") or (name == plain and name.startswith(adapted))
        expected = kind.__module__.startswith(LIBRARIES) if peft else kind is kinds.get(plain) or _elementwise(kind)
        if has_hooks(own):
            found[name] = "has a hook"
        elif replaced_forward(own):
            found[name] = "has a forward of its own"
        elif not expected:
            found[name] = (
                f"is a {kind.__qualname__}" if peft or plain in kinds else "is a module that its class does not have"
            )
    return found


def _elementwise(kind: type[nn.Module]) -> bool:
    """Activations and the like, which compute a part of the features as they compute all."""
    if kind is nn.Identity:
        return True
    library = kind.__module__.startswith(LIBRARIES) and kind.__module__.rpartition(".")[2] in _ACTIVATIONS
    return library and kind.__name__ not in _MIXING


def check_known(model: nn.Module) -> None:
    """Raise :class:`InvalidInput` for a model of a known family that its layers would not run as it is, and for one of
    any other whose parameters are not those of its configuration, by which it is planned."""
    if in_family(model):
        check_called(layered_model(without_weights(model)), altered_modules(model))
        return
    stock = bare(model) if type(model).__module__.startswith("transformers.") else None
    if stock is None:
        return
    made = {name: own.shape for name, own in stock.named_parameters()}
    held = {plain_name(name): own.shape for name, own in model.named_parameters() if not is_adapter(name)}
    for name in sorted({*made, *held}):
        if made.get(name) != held.get(name):
            was, now = (f"{tuple(each[name])}" if name in each else "missing" for each in (made, held))
            raise InvalidInput(
                f"{type(model).__name__}: parameter {name} is {now}, by its configuration {was}; {_DESCRIBE}"
            )


def check_called(layered: LayeredModel, altered: Mapping[str, str]) -> None:
    """Raise :class:`InvalidInput` for what layers of a known family do not call."""
    if isinstance(layered, Generic):
        return
    called = tuple(f"{own}." for layer in layered.layers for own in layer.stock_modules)
    for name, what in altered.items():
        held = f"{name}.".startswith(called) and name not in layered.stand_ins
        if not held and name not in layered.shared_modules:
            model = type(layered.model).__name__
            raise InvalidInput(
                f"{model}: {name or 'the model itself'} {what}, which its layers do not call; {_DESCRIBE}"
            )


def check_split(layer: Layer, altered: Mapping[str, str], *, sequence: bool) -> None:
    """Raise :class:`InvalidInput` for what would see a part of the features where tensor parallelism splits the layer,
    or, with sequence parallelism, of the tokens."""
    inside = () if sequence else _inside(layer)
    for name, what in altered.items():
        own = layer.name_of_module(name)
        if own is None or not (sequence or any(own == path or own.startswith(f"{path}.") for path in inside)):
            continue
        raise InvalidInput(
            f"layer {layer.kind!r}: {own} {what}, which would see a part of what it sees in one process where tensor "
            "parallelism splits the layer; remove it, or plan without TP (--space dp+pp)"
        )


def _inside(layer: Layer) -> Sequence[str]:
    """What is computed by parts: regions, and what stands beside a projection that is split."""
    regions = [rule.path for rule in layer.rules if isinstance(rule, Region)]
    projections = [rule.path for rule in layer.rules if isinstance(rule, Columns | Rows)]
    parents = {path.rpartition(".")[0] for path in projections if "." in path}
    children = [
        f"{parent}.{name}".lstrip(".") for parent in parents for name, _ in layer.get_submodule(parent).named_children()
    ]
    return [*regions, *projections, *(children if parents - set(regions) else [])]
