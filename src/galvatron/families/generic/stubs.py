"""A stock model's own forward, run in parts: before, with and after its repeated blocks.

A *stubbed model* is a copy of the model without weights in which blocks have stand-ins, and so may every *unit*: a
module that owns parameters (outside the blocks). A unit's stand-in runs on the meta device for the shape of its result
and returns a tensor of NaNs. So any part of the model runs without the weights of the others, and what secretly uses
them shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from galvatron.families.build import without_weights
from galvatron.families.generic.balance import collect_scores

__all__ = [
    "GROUPED",
    "LOOKS",
    "Call",
    "Held",
    "Stop",
    "StubbedModel",
    "Unit",
    "depending",
    "find_units",
    "has_nan",
    "on_meta",
    "to_meta",
]


@dataclass(frozen=True, slots=True)
class Unit:
    """A module outside the blocks that owns parameters."""

    name: str
    module: nn.Module
    results: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Of its stand-ins on the meta device, by what they were given."""


class Held(nn.Module):
    """A parameter that a module around the blocks owns itself, as a module that a layer can own."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.value = parameter

    def forward(self) -> Tensor:
        return self.value


@dataclass(slots=True)
class Call:
    """How a block was called."""

    block: int
    """Its number, counted over all lists."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> dict[int | str, Any]:
        """All arguments by their places."""
        return dict((*enumerate(self.args), *self.kwargs.items()))

    def argument(self, place: int | str) -> Any:
        """What it was given in this place: by number, or by keyword."""
        return self.kwargs[place] if isinstance(place, str) else self.args[place]

    def given(self, arguments: Mapping[int | str, Any]) -> Call:
        """The same call with other values of some arguments."""
        args = tuple(arguments.get(place, own) for place, own in enumerate(self.args))
        return Call(self.block, args, {name: arguments.get(name, own) for name, own in self.kwargs.items()})


class Stop(Exception):
    """Ends a forward pass where enough is known."""


def find_units(model: nn.Module, lists: Sequence[str]) -> tuple[Unit, ...]:
    """The units around the lists of blocks of these names, in the order of the model; those of modules that contain a
    list are single parameters (:class:`Held`)."""
    units: list[Unit] = []

    def walk(name: str, module: nn.Module) -> None:
        inner = {f"{name}.{child}".lstrip("."): own for child, own in module.named_children()}
        around = not name or any(blocks.startswith(f"{name}.") for blocks in lists)
        if around:
            units.extend(
                Unit(f"{name}.{key}".lstrip("."), Held(own)) for key, own in module.named_parameters(recurse=False)
            )
        elif any(True for _ in module.parameters(recurse=False)):
            units.append(Unit(name, module))
            return
        for child, own in inner.items():
            if child not in lists:
                walk(child, own)

    walk("", model)
    return tuple({id(unit.module): unit for unit in units}.values())


@dataclass(slots=True)
class _Log:
    calls: list[Call] = field(default_factory=list)
    used: list[tuple[str, int]] = field(default_factory=list)
    """Units that ran or were read, with the number of blocks called before."""
    outside: list[str] = field(default_factory=list)
    """Units with a parameter that was used outside of them."""


class StubbedModel:
    """A copy of a model without weights, with stand-ins for its blocks and for the units not in ``real``."""

    def __init__(self, model: nn.Module, lists: Sequence[str], units: Iterable[Unit], real: Iterable[str] = ()) -> None:
        self._stock = model
        self.model = without_weights(model)
        for module in self.model.modules():  # a decoder has a configuration of its own
            config: Any = getattr(module, "config", None)
            if hasattr(config, "use_cache"):
                config.use_cache = False
        collect_scores(self.model, flag=False)  # there are none of blocks that do not run
        self.blocks: list[nn.Module] = [block for name in lists for block in self.model.get_submodule(name).children()]
        """Those of all lists, in order."""
        self.log = _Log()
        self._held = {unit.name: unit.module for unit in units if isinstance(unit.module, Held)}
        self._real = {unit.name: unit.module for unit in units if unit.name in set(real)}
        self._stubs: dict[str, nn.Module] = {}
        self._device: torch.device | None = None
        self._dtype: torch.dtype | None = None
        for unit in units:
            if unit.name in self._held:
                continue
            if unit.name in self._real:
                self.model.set_submodule(unit.name, unit.module)
            else:
                stub = self._stubs[unit.name] = _bare(self.model.get_submodule(unit.name))
                stub.forward = self._stand_in(unit, stub.forward)
        self.on_block: Callable[[Call], Any] = _stop
        """What a block's stand-in returns."""
        self._forwards = [_bare(block).forward for block in self.blocks]
        for index, block in enumerate(self.blocks):
            block.forward = self._block(index)
        self.watched: frozenset[str] = frozenset()
        """Units whose stand-ins return zeros unless a NaN came in: to see whether one does."""
        self.noise: torch.Generator | None = None
        """Where it is set, stand-ins return random numbers: for what follows them to be computed with."""
        self.tags: dict[str, Tensor] = {}
        """Where there are some, a unit's stand-in returns what depends on its tag and on all that it was given."""
        self.note_uses = False
        """Whether to log uses of parameters other than by their modules, which slows all of torch down."""
        self._within = False

    def run(self, inputs: Mapping[str, Tensor], dtype: torch.dtype, *, training: bool) -> Any:
        """The stock forward on these inputs; None if it was stopped. The log is that of the last run."""
        inputs = {name: own.to(dtype) if own.is_floating_point() else own for name, own in inputs.items()}
        self.log = _Log()
        self._place(next(iter(inputs.values())).device, dtype)
        if self.model.training != training:
            self.model.train(training)
        with self._parameters_held(dtype):
            try:
                return self.model(**inputs)
            except Stop:
                return None

    def call(self, method: str, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
        """Another method of the model on these inputs."""
        self.log = _Log()
        self._place(next(iter(inputs.values())).device, dtype)
        with self._parameters_held(dtype):
            return getattr(self.model, method)(**inputs)

    def shapes_of_block(self, call: Call) -> Any:
        """What the block itself would return, on the meta device."""
        return self._on_meta(self._forwards[call.block], call.args, call.kwargs)

    def _on_meta(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = to_meta((args, kwargs))
        self._within = True
        try:
            with torch.no_grad(), on_meta():
                return forward(*args, **kwargs)
        finally:
            self._within = False

    def _with_zeros(self, name: str, args: Any, kwargs: Any) -> Any:
        """What a unit returns that has weights of zero, without values."""
        module = copy.deepcopy(self._stock.get_submodule(name))
        for parent in module.modules():
            for key, own in list(parent.named_parameters(recurse=False)):
                zeros = torch.zeros(own.shape, dtype=self._dtype, device=self._device)
                setattr(parent, key, nn.Parameter(zeros, requires_grad=False))
        self._within = True
        try:
            with torch.no_grad():
                return to_meta(module.to(self._device)(*args, **kwargs))
        finally:
            self._within = False

    def _block(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = Call(index, args, kwargs)
            self.log.calls.append(call)
            return self.on_block(call)

        return forward

    def _stand_in(self, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        name, results = unit.name, unit.results

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            self.log.used.append((name, len(self.log.calls)))
            clean = name in self.watched and not has_nan((args, kwargs))
            fill = 0.0 if clean else torch.nan
            key = repr((self._dtype, self.model.training, tree_map(_outline, (args, kwargs))))
            if key not in results:
                try:
                    results[key] = self._on_meta(forward, args, kwargs)
                except (RuntimeError, NotImplementedError):  # it looks at values (of masks, of sizes of images)
                    results[key] = self._with_zeros(name, args, kwargs)
            made = results[key]
            filled = tree_map(lambda own: self._filled(own, fill) if isinstance(own, Tensor) else own, made)
            return depending(filled, (self.tags[name], args, kwargs)) if name in self.tags else filled

        return stand_in

    def _filled(self, like: Tensor, fill: float) -> Tensor:
        if self.noise is not None and like.is_floating_point():
            return torch.randn(like.shape, generator=self.noise).to(self._device, like.dtype)
        return torch.full(like.shape, fill if like.is_floating_point() else 0, dtype=like.dtype, device=self._device)

    @contextmanager
    def _parameters_held(self, dtype: torch.dtype) -> Iterator[None]:
        """Give the modules around the blocks their own parameters: the real ones or stand-ins."""
        places: dict[str, tuple[nn.Module, str, nn.Parameter]] = {}
        for name, held in self._held.items():
            path, _, attribute = name.rpartition(".")
            module = self.model.get_submodule(path)
            own = getattr(module, attribute)
            places[name] = module, attribute, own
            delattr(module, attribute)
            if name in self._real:
                value = held()
            else:
                value = self._filled(own.to(dtype), 0.0 if name in self.watched else torch.nan)
                if name in self.tags:
                    value = depending(value, self.tags[name])
            setattr(module, attribute, value)
        try:
            with _Uses(self, places) if self.note_uses else nullcontext():
                yield
        finally:
            for module, attribute, own in places.values():
                delattr(module, attribute)
                module.register_parameter(attribute, own)

    def _place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Buffers to the inputs' device, stand-ins to the dtype of activations."""
        if dtype != self._dtype:
            self._dtype = dtype
            for stub in self._stubs.values():
                stub.to(dtype)
        if device == self._device:
            return
        self._device = device
        real = {id(module) for own in self._real.values() for module in own.modules()}
        for module in self.model.modules():
            if id(module) not in real:
                for name, buffer in module.named_buffers(recurse=False):
                    if not buffer.is_meta:  # those of stand-ins stay there
                        module._buffers[name] = buffer.to(device)


LOOKS = frozenset({"__get__", "size", "dim", "numel", "element_size", "is_floating_point", "ndimension"})
"""Functions that ask a tensor for its shape, type or place, not for its values."""


class _Uses(TorchFunctionMode):
    """Notes when a held parameter is read, and when a unit's parameter is, though not by the unit itself."""

    def __init__(self, stubbed: StubbedModel, held: Mapping[str, tuple[nn.Module, str, nn.Parameter]]) -> None:
        super().__init__()
        self._stubbed = stubbed
        self._held = {id(getattr(module, attribute)): name for name, (module, attribute, _) in held.items()}
        self._owned = {id(own): name for name, stub in stubbed._stubs.items() for own in stub.parameters()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._stubbed._within and getattr(function, "__name__", "") not in LOOKS:
            log = self._stubbed.log
            for own in map(id, tree_flatten((args, kwargs))[0]):
                if own in self._held:
                    log.used.append((self._held[own], len(log.calls)))
                elif own in self._owned:
                    log.outside.append(self._owned[own])
        return function(*args, **(kwargs or {}))


def _bare(module: nn.Module) -> nn.Module:
    """A module without weights, whose buffers have shapes only from now on too."""
    for owner in module.modules():
        for key, own in owner._buffers.items():
            if own is not None and not own.is_meta:
                owner._buffers[key] = own.to("meta")
    return module


def to_meta(values: Any) -> Any:
    """The same with tensors that have shapes only."""
    return tree_map(lambda own: own.to("meta") if isinstance(own, Tensor) else own, values)


GROUPED = frozenset({"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"})
"""Products of rows with the matrices of their experts, by their names: the second exists only in some versions."""


@contextmanager
def on_meta() -> Iterator[None]:
    """Meanwhile products of experts have shapes: torch knows them for some types only."""
    with _ExpertShapes():  # type: ignore[no-untyped-call]
        yield


class _ExpertShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) in GROUPED:
            rows, weights = args[:2]
            return rows.new_empty(*rows.shape[:-1], weights.shape[-1])
        return function(*args, **(kwargs or {}))


def _stop(call: Call) -> Any:
    raise Stop


def _outline(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def depending(made: Any, given: Any) -> Any:
    """The same tensors as results of all that was given, as autograd sees it."""
    sources = [own for own in tree_flatten(given)[0] if isinstance(own, Tensor) and own.requires_grad]
    return tree_map(
        lambda own: (
            own + sum(source.sum() * 0 for source in sources).to(own.dtype)  # type: ignore[union-attr]
            if sources and isinstance(own, Tensor) and own.is_floating_point()
            else own
        ),
        made,
    )


def has_nan(values: Any) -> bool:
    """Whether any tensor among these holds a NaN."""
    return any(
        bool(own.isnan().any())
        for own in tree_flatten(values)[0]
        if isinstance(own, Tensor) and own.is_floating_point() and not own.is_meta
    )
