"""Whether two blocks are alike, so that what watching one of them showed holds for the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from galvatron.families.generic.stubs import Call
from galvatron.families.given import has_hooks

__all__ = ["outline_of"]

_PLAIN = (bool, int, float, str, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


def outline_of(block: nn.Module, call: Call) -> Hashable:
    """All of a block and of how it is called that decides what it does with tensors that have shapes only. None: one of
    its modules has a hook or a forward of its own, so that it is compared with no other block."""
    if any(has_hooks(own) or "forward" in vars(own) for own in block.modules()):
        return None
    return (
        tuple(chain.from_iterable(_of_module(path, own) for path, own in block.named_modules())),
        tuple((name, tuple(own.shape)) for name, own in block.named_parameters(remove_duplicate=False)),
        tuple((name, tuple(own.shape), own.dtype) for name, own in block.named_buffers(remove_duplicate=False)),
        _of_call(call),
    )


def _of_module(path: str, module: nn.Module) -> Iterator[Any]:
    config = getattr(module, "config", None)
    numbers = tuple(
        sorted((name, repr(own)) for name, own in vars(module).items() if name != "training" and _is_plain(own))
    )
    functions = tuple((name, own) for name, own in vars(module).items() if isinstance(own, _FUNCTIONS))
    # A configuration's own comparison and text leave out how attention and experts are computed.
    chosen = None if config is None else repr(sorted((name, repr(own)) for name, own in vars(config).items()))
    yield from (path, type(module), type(module).forward, numbers, functions, chosen)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _of_call(call: Call) -> Hashable:
    leaves, form = tree_flatten((call.args, call.kwargs))
    return str(form), tuple(
        (tuple(own.shape), own.dtype) if isinstance(own, Tensor) else repr(own) if _is_plain(own) else type(own)
        for own in leaves
    )
