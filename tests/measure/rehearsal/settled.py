"""Gloo whose own memory a meter on the calling thread does not see, as it does not see NCCL's.

Gloo makes copies on the calling thread and lets go of them, and of a collective's tensors, on threads of its own: the
profiler, which follows one thread, would hear of the allocation and never of the release.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread, current_thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

_COLLECTIVES = ("all_gather_single", "allreduce", "reduce_scatter_single")
_LIMIT_S = 20


class _Sent:
    """A send of a copy, which the meter sees as little as gloo's own memory. Not done before it was waited for."""

    def __init__(self, work: dist.Work) -> None:
        self._work, self._waited_for = work, False

    def wait(self) -> bool:
        self._work.wait()
        self._waited_for = True
        return True

    def is_completed(self) -> bool:
        return self._waited_for


class _Done:
    """In place of the work, which would hold the tensors as well."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def settled() -> Iterator[None]:
    """While this is entered, collectives and receives run on another thread, and are done and forgotten when they
    return; sends are started there, of copies."""
    real = {name: vars(dist.ProcessGroup)[name] for name in _COLLECTIVES}  # got from the class they would not bind
    for name in _COLLECTIVES:
        setattr(dist.ProcessGroup, name, _patient(getattr(dist.ProcessGroup, name)))
    exchange = dist.batch_isend_irecv
    dist.batch_isend_irecv = _patient_exchange(exchange)
    try:
        yield
    finally:
        dist.batch_isend_irecv = exchange
        for name, method in real.items():
            setattr(dist.ProcessGroup, name, method)


def _patient(collective: Callable[..., Any]) -> Callable[..., _Done]:
    def call(group: dist.ProcessGroup, *args: Any) -> _Done:
        tensors = [own for own in tree_flatten(args)[0] if isinstance(own, Tensor)]
        before = [_users(tensor) for tensor in tensors]
        _elsewhere(lambda: collective(group, *args).wait())
        deadline = time.monotonic() + _LIMIT_S
        while [_users(tensor) for tensor in tensors] != before:
            assert time.monotonic() < deadline, "gloo does not let go of a collective's tensors"
            time.sleep(1e-4)
        return _Done()

    return call


def _patient_exchange(exchange: Callable[..., list[dist.Work]]) -> Callable[..., Any]:
    """In place of ``batch_isend_irecv``, whose operations are all sends or all receives here."""

    def call(operations: list[dist.P2POp]) -> list[Any]:
        works: list[dist.Work] = []
        receiving = operations[0].op is dist.irecv

        def run() -> None:
            copies = [operation.tensor.clone() for operation in operations]
            moved = [
                dist.P2POp(operation.op, copy, operation.peer, operation.group)
                for operation, copy in zip(operations, copies, strict=True)
            ]
            works.extend(exchange(moved))
            if receiving:
                for work in works:
                    work.wait()
                for operation, copy in zip(operations, copies, strict=True):
                    operation.tensor.copy_(copy)

        _elsewhere(run)
        return [_Done()] if receiving else [_Sent(work) for work in works]

    return call


def _elsewhere(run: Callable[[], object]) -> None:
    """Call it on another thread, which must not collect this one's garbage meanwhile: the meter would not see it go."""
    thread = Thread(target=torch.no_grad()(run), name=current_thread().name)  # it works for this one alone
    gc.disable()
    thread.start()
    thread.join()
    gc.enable()


def _users(tensor: Tensor) -> tuple[int, int]:
    """How many hold the tensor, and how many its memory."""
    held: int = tensor._use_count()  # type: ignore[attr-defined]
    return held, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
