"""Gloo that lets go at once, so that a meter on the calling thread sees every release.

Gloo's own threads hold a collective's tensors a moment longer than the one who waits for it, and may be the last to let
go of them: a release that the profiler, which follows one thread, never hears of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")
_LIMIT_S = 20


class _Done:
    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def settled() -> Iterator[None]:
    """While this is entered, collectives are done and forgotten by all threads when they return."""
    real = {name: getattr(dist, name) for name in _COLLECTIVES}
    for name, function in real.items():
        setattr(dist, name, _patient(function))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def _patient(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        before = [_users(tensor) for tensor in tensors]
        collective(*args, async_op=False, **kwargs)
        deadline = time.monotonic() + _LIMIT_S
        while [_users(tensor) for tensor in tensors] != before:
            assert time.monotonic() < deadline, "gloo does not let go of a collective's tensors"
            time.sleep(1e-4)
        return _Done() if async_op else None

    return call


def _users(tensor: Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
