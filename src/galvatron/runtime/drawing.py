"""Whether modules draw random numbers in training: dropout, noise, random routers.

What modules are set to says so (``attention_dropout``, ``router_jitter_noise``), and otherwise their code: a call of
``torch.rand`` in forward, or in what forward calls. Numbers of NumPy and Python show in their code alone.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Set
from types import CodeType, FunctionType

import numpy as np
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["draws", "draws_on_host"]

_SWITCHES = ("drop", "jitter", "noise")
"""In names of figures that turn drawing on."""
_CALLS = frozenset({
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "gumbel_softmax", "log_normal_", "multinomial",
    "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm",
    "rrelu", "uniform_",
})  # fmt: skip
_DEEP = 4
"""How far calls are followed."""


def draws(modules: Iterable[nn.Module]) -> bool:
    """Whether any of them does."""
    return any(_draws(module) for module in modules)


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RReLU):
        return True
    for name, value in vars(module).items():
        if _is_switch(name) and isinstance(value, float) and value > 0:
            return True
    return _calls(module, _draws_untold)


def draws_on_host(modules: Iterable[nn.Module]) -> bool:
    """Whether the code of any of them uses generators of NumPy or Python."""
    return any(_calls(module, _uses_host) for module in modules)


_Does = Callable[[FunctionType, Set[str]], bool]
"""What a function does by itself, given all names in its code."""


def _draws_untold(function: FunctionType, names: Set[str]) -> bool:
    """Without being told to by a figure, which is off here."""
    code = function.__code__
    told = any(map(_is_switch, names)) or any("drop" in name for name in code.co_varnames[: code.co_argcount])
    return bool(names & _CALLS) and not told


def _uses_host(function: FunctionType, names: Set[str]) -> bool:
    used = [function.__globals__.get(name) for name in names]
    return any(own is random or own is np.random for own in used) or (
        "random" in names and any(own is np for own in used)
    )


def _calls(module: nn.Module, does: _Does) -> bool:
    """Whether a module's forward does it, or what forward calls; not PyTorch's own."""
    if type(module).__module__.startswith("torch."):
        return False
    forward = getattr(module.forward, "__func__", module.forward)
    forward = inspect.unwrap(forward) if isinstance(forward, FunctionType) else None
    return isinstance(forward, FunctionType) and _reaches(forward, does, module, {}, _DEEP)


def _reaches(function: FunctionType, does: _Does, module: nn.Module, seen: dict[CodeType, int], deep: int) -> bool:
    code = function.__code__
    if seen.get(code, 0) >= deep:
        return False
    seen[code] = deep
    names = set(_names(code))
    called = _called(function, names, module)
    return does(function, names) or any(_reaches(own, does, module, seen, deep - 1) for own in called)


def _names(code: CodeType) -> Iterator[str]:
    """What code looks up in objects and modules, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _called(function: FunctionType, names: Iterable[str], module: nn.Module) -> Iterator[FunctionType]:
    """Functions of these names beside this one, and methods of the module, but for PyTorch's."""
    for name in names:
        for found in (function.__globals__.get(name), getattr(type(module), name, None)):
            called = inspect.unwrap(found) if isinstance(found, FunctionType) else None
            if isinstance(called, FunctionType) and not (called.__module__ or "").startswith("torch."):
                yield called


def _is_switch(name: str) -> bool:
    return any(switch in name for switch in _SWITCHES)
