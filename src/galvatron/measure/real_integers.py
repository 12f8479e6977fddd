"""Whole numbers with values among tensors that have none: which token is an image's, how large each image is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from galvatron.families.generic.stubs import Call

__all__ = ["RealIntegers", "faked", "faked_tensor"]

_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_COUNTING = frozenset({torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step})


class RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside a fake mode: what is computed of whole numbers alone is computed."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = tree_flatten((args, kwargs))[0]
        tensors = [own for own in flat if isinstance(own, Tensor)]
        dtype = kwargs.get("dtype")
        if tensors:
            real = all(not isinstance(own, FakeTensor) and own.dtype in _WHOLE for own in tensors)
            real = real and (dtype is None or dtype in _WHOLE)
        else:
            counted = function in _COUNTING and all(type(own) in (int, bool) or own is None for own in args)
            real = dtype in _WHOLE or (dtype is None and counted)
        if not real:
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)


def faked(call: Call, fake: FakeTensorMode, real: RealIntegers | None) -> Call:
    """A call of a block with tensors without values."""
    args, kwargs = tree_map(
        lambda own: faked_tensor(own, fake, real) if isinstance(own, Tensor) else own, (call.args, call.kwargs)
    )
    return Call(call.block, args, kwargs)


def faked_tensor(own: Tensor, fake: FakeTensorMode, real: RealIntegers | None) -> Tensor:
    """A tensor without values, unless whole numbers keep theirs."""
    return own if real is not None and not own.is_floating_point() else fake.from_tensor(own)
