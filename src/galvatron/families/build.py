"""Stock models without weights: parameters on the meta device, buffers right and on the CPU.

A model of any size is built in seconds and takes no memory; its weights come layer by layer from
``galvatron.families.weights``.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedConfig

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Attention, Training
from galvatron.core.spec.figures import MOST_LAYERS
from galvatron.families.discovery import family_of

__all__ = ["bare", "build_meta", "read_config", "stock_class", "with_buffers", "without_weights"]

_LOG = logging.getLogger(__name__)
_DEPTHS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip
"""Names of fields with a number of layers."""
_ATOMS = (bool, int, float, str, type(None), torch.dtype)
_EMPTY = (OrderedDict, set)
_OWN = ("_parameters", "_buffers", "_modules")
"""Fields of a module whose entries are not shared with others."""


def without_weights(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """A copy whose parameters have shapes only (of ``dtype``, if given); those that are shared stay shared."""
    modules = list(model.modules())
    copies: dict[int, Any] = {
        id(own): nn.Parameter(
            torch.empty_strided(own.shape, own.stride(), device="meta", dtype=dtype or own.dtype),
            requires_grad=own.requires_grad,
        )
        for own in {own: None for module in modules for own in module._parameters.values() if own is not None}
    }
    # A module has a dozen dictionaries of hooks, nearly all of them empty: most of what a deep copy would spend.
    for module in modules:
        copies.update({id(own): type(own)() for own in vars(module).values() if type(own) in _EMPTY and not own})
    if all(map(_copied_by_fields, modules)):
        copies.update({id(own): type(own).__new__(type(own)) for own in modules})
        for module in reversed(modules):
            vars(copies[id(module)]).update(_fields(module, copies))
    return copy.deepcopy(model, copies)


def _copied_by_fields(module: nn.Module) -> bool:
    """Whether a deep copy of the module is one of its fields, as of nearly all."""
    kind: Any = type(module)
    return (
        kind.__setstate__ is nn.Module.__setstate__
        and kind.__getstate__ is nn.Module.__getstate__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__new__ is object.__new__
        and not hasattr(kind, "__deepcopy__")
        and "__deepcopy__" not in vars(module)
    )


def _fields(module: nn.Module, copies: dict[int, Any]) -> dict[str, Any]:
    """Copies of a module's fields: what a deep copy of the whole makes, which takes half as long again."""

    def copied(own: Any) -> Any:
        if type(own) in _ATOMS:
            return own
        known = copies.get(id(own))
        return copy.deepcopy(own, copies) if known is None else known

    return {
        name: {key: copied(each) for key, each in own.items()} if name in _OWN and type(own) is dict else copied(own)
        for name, own in vars(module).items()
    }


def with_buffers(model: nn.Module) -> nn.Module:
    """A model on the meta device with values for its buffers, on which sizes and work do not depend."""
    if not any(own.is_meta for own in model.buffers()):
        return model
    empty: nn.Module = without_weights(model)
    for module in empty.modules():
        for key, own in module.named_buffers(recurse=False):
            if own.is_meta:
                module._buffers[key] = torch.ones(own.shape, dtype=own.dtype)
    return empty


def build_meta(
    config: Mapping[str, Any] | PreTrainedConfig, training: Training, *, as_named: bool = False
) -> nn.Module:
    """The stock model of a configuration (the content of a ``config.json``), trained that way, without weights.

    A known family has its pre-training head, unless it is to be the class that ``architectures`` names. Where there is
    no fused attention, it is eager, with a warning.
    """
    config = copy.deepcopy(config) if isinstance(config, PreTrainedConfig) else read_config(config)
    if training.dropout is False:
        _zero_dropout(config)
    config.use_cache = False
    _check_depth(config)
    stock = stock_class(config, as_named=as_named)
    # Constructors draw random numbers for some parameters, which nobody will see.
    with torch.random.fork_rng(devices=[]), _EmptyOnMeta():
        model = _built(stock, config, fused=training.attention is Attention.FUSED)
    _parameters_to_meta(model)
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise InvalidInput(
            f"{stock.__name__}: its buffer {lost[0]} gets its value only with the weights; build the model with them"
        )
    return model


def _check_depth(config: PreTrainedConfig) -> None:
    """Refuse more layers than any model has, which would be built one by one."""
    for part in (config, *(each for each in vars(config).values() if isinstance(each, PreTrainedConfig))):
        for name in _DEPTHS:
            count = getattr(part, name, None)
            if isinstance(count, int) and count > MOST_LAYERS:
                raise InvalidInput(
                    f"model_type {config.model_type!r}: {name} of its configuration is {count:,}; expected at most "
                    f"{MOST_LAYERS:,}"
                )


def _built(stock: Any, config: PreTrainedConfig, *, fused: bool) -> nn.Module:
    try:
        if fused and stock._supports_sdpa:
            try:
                model: nn.Module = stock._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
                return model
            except ValueError as error:
                if "scaled_dot_product_attention" not in str(error):  # which a part of the model does not have
                    raise
        if fused:
            _LOG.warning("%s has no fused attention in transformers: it trains with attention 'eager'", stock.__name__)
        model = stock._from_config(config, attn_implementation="eager", dtype=torch.float32)
    except Exception as error:  # of whatever kind: transformers checks little before it computes
        raise _unusable(stock.__name__, error) from error
    return model


def _unusable(name: str, error: Exception) -> InvalidInput:
    reason = str(error).strip().partition("\n")[0]
    return InvalidInput(
        f"{name}: transformers {transformers.__version__} cannot build it from this configuration "
        f"({type(error).__name__}: {reason}); compare it with the config.json of a published model"
    )


def bare(model: Any) -> nn.Module | None:
    """A stock model of the class and configuration of this one, without weights; None if it cannot be built."""
    try:
        with torch.random.fork_rng(devices=[]), _EmptyOnMeta():
            made: nn.Module = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32)
    except Exception:  # of whatever kind: a class may take more than its configuration
        return None
    return made


def read_config(content: Mapping[str, Any]) -> PreTrainedConfig:
    """The content of a ``config.json`` with transformers' defaults for what it leaves out."""
    kind = content.get("model_type")
    if kind is None:
        raise InvalidInput("the model's configuration has no field model_type; expected one such as 'bert'")
    try:
        empty = AutoConfig.for_model(kind)
    except ValueError:
        raise InvalidInput(
            f"model_type is {kind!r}, which transformers {transformers.__version__} does not know"
        ) from None
    try:
        config: PreTrainedConfig = type(empty).from_dict(dict(content))
    except Exception as error:  # of whatever kind: each class checks its fields in its own way
        raise _unusable(str(kind), error) from error
    return config


def stock_class(config: PreTrainedConfig, *, as_named: bool = False) -> type[nn.Module]:
    """The class that :func:`build_meta` builds."""
    named = config.architectures[0] if config.architectures else None
    family = family_of(config.model_type)
    name = named if family is None or (as_named and named) else family.head_class
    if name is None:
        raise InvalidInput(
            f"model_type is {config.model_type!r}, a family without an adapter, and the configuration's field "
            "architectures is empty; expected it to name the class to train, such as ['MistralForCausalLM']"
        )
    found = getattr(transformers, name, None)
    if found is None:
        raise InvalidInput(
            f"architectures names {name!r}; expected a model class of transformers {transformers.__version__}"
        )
    stock: type[nn.Module] = found
    return stock


def _zero_dropout(config: PreTrainedConfig) -> None:
    for field, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _zero_dropout(value)
        elif "drop" in field and isinstance(value, float):
            setattr(config, field, 0.0)
        elif field == "apply_spec_augment":  # masks over what is heard
            setattr(config, field, False)


_FILLING = {"constant_", "fill_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "zero_"}
"""What gives a tensor its first values, of torch and of transformers, which puts its own in torch's place. It changes
nothing on the meta device, where it takes most of a build's time."""


class _EmptyOnMeta(TorchFunctionMode):
    """Uninitialised tensors, the raw material of torch's own layers, take no memory; all others are computed."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        elif getattr(function, "__name__", None) in _FILLING:
            filled = args[0] if args else kwargs["tensor"]
            if filled.is_meta:
                return filled
        return function(*args, **kwargs)


def _parameters_to_meta(model: nn.Module) -> None:
    """The remaining parameters (made from ones or zeros) too; shared ones stay shared."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.is_meta:
                if parameter not in moved:
                    moved[parameter] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                setattr(module, name, moved[parameter])
