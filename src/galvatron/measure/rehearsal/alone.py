"""A world without the other ranks: CPU kernels that keep what CUDA's keep, and weights that cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from galvatron.core.errors import GalvatronError

__all__ = ["alone_as", "kernels_for"]


@contextmanager
def kernels_for(device: torch.device) -> Iterator[None]:
    """While this is entered, what runs on the device keeps what CUDA would keep."""
    if device.type == "cuda":
        yield
        return
    real: dict[str, Callable[..., Tensor]] = {
        name: getattr(functional, name) for name in ("dropout", "scaled_dot_product_attention")
    }
    attend = real["scaled_dot_product_attention"]

    def without_dropout(*tensors: Tensor, dropout_p: float = 0.0, **options: Any) -> Tensor:
        return attend(*tensors, **options)

    setattr(functional, "dropout", _dropout)  # noqa: B010
    setattr(functional, "scaled_dot_product_attention", without_dropout)  # noqa: B010
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(functional, name, function)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


_SPREAD = 0.02
"""Of received numbers: about that of fresh weights, far from zero, infinity and denormals."""


class _Late:
    """A message that takes as long as it is let: a real one's buffers may be held until it is waited for."""

    def __init__(self) -> None:
        self._waited_for = False

    def is_completed(self) -> bool:
        return self._waited_for

    def wait(self) -> bool:
        self._waited_for = True
        return True


def _exchange(operations: Sequence[dist.P2POp]) -> list[_Late]:
    """In place of ``batch_isend_irecv``. The fake group would leave in a received tensor whatever its memory happened
    to hold, which may be slow to compute with."""
    for operation in operations:
        if operation.op is dist.irecv and operation.tensor.is_floating_point():
            operation.tensor.normal_(std=_SPREAD)
        elif operation.op is dist.irecv:
            operation.tensor.fill_(1)  # flags: what comes has gradients
    return [_Late()]


def _all_to_all(output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
    """In place of ``all_to_all_single``: the others send as many tokens as they get, so that experts have their share
    on average. The fake group would leave any number in the counts."""
    output.copy_(input)


@contextmanager
def alone_as(rank: int, world: int) -> Iterator[None]:
    """Be this rank of so many processes, none of which exist."""
    if dist.is_initialized():
        raise GalvatronError("a rehearsal needs a process of its own, but this one has joined a process group already")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    real = dist.batch_isend_irecv, dist.all_to_all_single
    dist.batch_isend_irecv, dist.all_to_all_single = _exchange, _all_to_all  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = real
        dist.destroy_process_group()
