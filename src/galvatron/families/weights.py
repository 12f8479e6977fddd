"""Where a model's weights come from at the start, one layer at a time, so that nobody ever holds the whole model.

Each source is made from the layered model before anything is split or placed, and keeps only names and shapes of it. It
then gives any layer's whole tensors, in fp32 on the CPU, whatever became of the model in between. Weights from a folder
are in ``galvatron.families.saved``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from galvatron.core.errors import InvalidInput
from galvatron.families.build import without_weights
from galvatron.families.layer import LayeredModel

__all__ = ["InitialWeights", "ModelWeights", "Parameter", "Weights", "parameters_of", "persistent_buffers"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a layer: who it is in the stock model."""

    name: str
    """In the layer."""
    aliases: tuple[str, ...]
    """In the stock model; a tied one has several, and checkpoints hold it under the first."""
    shape: torch.Size


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a model's checkpoints hold, by their stock names."""
    return {
        f"{name}.{key}".lstrip("."): own
        for name, module in model.named_modules()
        for key, own in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    }


def parameters_of(layered: LayeredModel) -> tuple[tuple[Parameter, ...], ...]:
    """The parameters of each layer."""
    names: dict[nn.Parameter, list[str]] = {}
    for stock_name, parameter in layered.model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(stock_name)
    return tuple(
        tuple(Parameter(name, tuple(names[own]), own.shape) for name, own in layer.named_parameters())
        for layer in layered.layers
    )


class InitialWeights:
    """The stock model's own random initialisation, a parameter's values drawn from (seed, its stock name) alone.

    So they depend neither on the plan, nor on other layers, nor on the order in which layers are asked for.
    """

    def __init__(self, layered: LayeredModel, seed: int) -> None:
        self._layers = parameters_of(layered)
        self._seed = seed
        # Because the modules of the original will be split and sharded.
        self._model: nn.Module = without_weights(layered.model, torch.float32)
        self._order = {name: place for place, (name, _) in enumerate(_children_first(self._model, ""))}

    def tensors(self, index: int) -> dict[str, Tensor]:
        # Of a tied weight the stock model keeps what the first of its modules drew.
        wanted = {own.aliases[0]: own for own in self._layers[index]}
        filled = {name: nn.Parameter(torch.full(own.shape, torch.nan)) for name, own in wanted.items()}
        originals = {name: self._swap(name, parameter) for name, parameter in filled.items()}
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _SeededBy(self._seeds(filled)):
                for module_name in sorted(_ancestors(filled), key=self._order.__getitem__):
                    torch.default_generator.manual_seed(_hash(self._seed, module_name))
                    self._initialise(module_name)
        finally:
            for name, original in originals.items():
                self._swap(name, original)
        for name, parameter in filled.items():
            if parameter.sum().isnan():
                raise InvalidInput(
                    f"{type(self._model).__name__} has no rule to initialise {name}; "
                    "start from weights: a model in memory or a checkpoint folder"
                )
        return {own.name: filled[name].detach() for name, own in wanted.items()}

    def _seeds(self, parameters: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, int]:
        return {parameter: _hash(self._seed, name) for name, parameter in parameters.items()}

    def _swap(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Put a parameter in the place of another; returns that one."""
        path, _, attribute = name.rpartition(".")
        module = self._model.get_submodule(path)
        original: nn.Parameter = module.get_parameter(attribute)
        setattr(module, attribute, parameter)
        return original

    def _initialise(self, module_name: str) -> None:
        """What ``initialize_weights`` does for one module: the innermost pre-trained model around it knows how."""
        module = self._model.get_submodule(module_name)
        initialise: Callable[[Any], None] | None = None
        for name in _with_parents(module_name):
            around = self._model.get_submodule(name)
            if isinstance(around, PreTrainedModel):
                initialise = around._init_weights
                break
        if initialise is not None:
            initialise(module)
        else:  # a plain model: torch's own layers know how they start
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()


_LARGE = 1 << 20
"""Elements from which on a parameter is filled by a thread of its own: PyTorch draws numbers with one."""
_THREADS = 8


class _SeededBy(TorchFunctionMode):
    """Seeds before a parameter is filled in place, so that its values do not depend on what was drawn before.

    Large ones are filled in threads beside each other, each with a generator of its own, which draws the same numbers.
    """

    def __init__(self, seeds: Mapping[nn.Parameter, int]) -> None:
        super().__init__()
        self._seeds = {id(parameter): seed for parameter, seed in seeds.items()}
        self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
        self._filling: dict[int, Future[None]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")
        for argument in (*args, *kwargs.values()):
            self._wait(argument)
        if id(target) in self._seeds and name.endswith("_") and not name.endswith("__"):
            seed = self._seeds[id(target)]
            if name in ("normal_", "uniform_") and target.numel() >= _LARGE and kwargs.get("generator") is None:
                own = {**kwargs, "generator": torch.Generator().manual_seed(seed)}
                self._filling[id(target)] = self._pool.submit(_filled, function, args, own)
                return target
            torch.default_generator.manual_seed(seed)
        return function(*args, **kwargs)

    def _wait(self, argument: object) -> None:
        filling = self._filling.pop(id(argument), None)
        if filling is not None:
            filling.result()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._pool.shutdown()
        for filling in self._filling.values():
            filling.result()


def _filled(function: Callable[..., object], args: Any, kwargs: Mapping[str, Any]) -> None:
    with torch.no_grad():  # which is each thread's own
        function(*args, **kwargs)


def _hash(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest())


def _with_parents(name: str) -> list[str]:
    """A module's name, its parent's, and so on to the root's, which is empty."""
    names = [name]
    while names[-1]:
        names.append(names[-1].rpartition(".")[0])
    return names


def _ancestors(parameters: Iterable[str]) -> set[str]:
    """Names of all modules that have one of these parameters, themselves or in a child: any of them may fill it."""
    return {module for name in parameters for module in _with_parents(name.rpartition(".")[0])}


def _children_first(module: nn.Module, name: str) -> Iterable[tuple[str, nn.Module]]:
    """In the order of transformers' initialisation: a parent overrides what its children did."""
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}".lstrip("."))
    yield name, module


class Weights(Protocol):
    """A source of weights."""

    def tensors(self, index: int) -> dict[str, Tensor]:
        """The whole tensors of a layer by the names of its parameters, tied ones included."""


class ModelWeights:
    """From a stock model in memory: the one that was cut, or another of the same shape."""

    def __init__(self, layered: LayeredModel, model: nn.Module | None = None) -> None:
        self._layers = parameters_of(layered)
        source = layered.model if model is None else model
        self._tensors = {name: own.detach() for name, own in source.named_parameters(remove_duplicate=False)}
        for parameter in (own for layer in self._layers for own in layer):
            found = _first(self._tensors, parameter.aliases)
            if found is None or found.is_meta or found.shape != parameter.shape:
                given = "missing" if found is None else "without values" if found.is_meta else tuple(found.shape)
                raise InvalidInput(
                    f"{type(source).__name__} in memory: {parameter.aliases[0]} is {given}; "
                    f"expected a tensor of shape {tuple(parameter.shape)}"
                )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All that layers will be given, by stock names, tied ones once."""
        for own in dict.fromkeys(own.aliases for layer in self._layers for own in layer):
            found = _first(self._tensors, own)
            if found is not None:
                yield own[0], found

    def tensors(self, index: int) -> dict[str, Tensor]:
        found = {own.name: _first(self._tensors, own.aliases) for own in self._layers[index]}
        return {name: tensor.to("cpu", torch.float32) for name, tensor in found.items() if tensor is not None}


def _first(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor | None:
    return next((tensors[name] for name in names if name in tensors), None)
