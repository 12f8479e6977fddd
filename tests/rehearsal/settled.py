"""Gloo whose own memory a meter on the calling thread does not see, as it does not see NCCL's.

Gloo makes copies on the calling thread and lets go of them, and of a collective's tensors, on threads of its own: the
profiler, which follows one thread, would hear of the allocation and never of the release.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

_COLLECTIVES = ("all_gather_single", "allreduce", "reduce_scatter_single")
_LIMIT_S = 20


class _Done:
    """In place of the work, which would hold the tensors as well."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def settled() -> Iterator[None]:
    """While this is entered, collectives run on another thread, and are done and forgotten when they return."""
    real = {name: vars(dist.ProcessGroup)[name] for name in _COLLECTIVES}  # got from the class they would not bind
    for name in _COLLECTIVES:
        setattr(dist.ProcessGroup, name, _patient(getattr(dist.ProcessGroup, name)))
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(dist.ProcessGroup, name, method)


def _patient(collective: Callable[..., Any]) -> Callable[..., _Done]:
    def call(group: dist.ProcessGroup, *args: Any) -> _Done:
        tensors = [own for own in tree_flatten(args)[0] if isinstance(own, Tensor)]
        before = [_users(tensor) for tensor in tensors]
        elsewhere = Thread(target=_run, args=(collective, group, *args))
        elsewhere.start()
        elsewhere.join()
        deadline = time.monotonic() + _LIMIT_S
        while [_users(tensor) for tensor in tensors] != before:
            assert time.monotonic() < deadline, "gloo does not let go of a collective's tensors"
            time.sleep(1e-4)
        return _Done()

    return call


@torch.no_grad()
def _run(collective: Callable[..., Any], *args: Any) -> None:
    collective(*args).wait()


def _users(tensor: Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
