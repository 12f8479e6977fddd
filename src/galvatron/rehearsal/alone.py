"""A world of any size in which only this process exists: PyTorch's fake process group.

Collectives return at once. A gather repeats this rank's own part, a reduction leaves its own contribution: shapes and
memory are those of the real thing, values are not. All that is used of PyTorch's private test modules is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from galvatron.errors import GalvatronError

__all__ = ["alone_as"]

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
        if operation.op is dist.irecv:
            operation.tensor.normal_(std=_SPREAD)
    return [_Late()]


@contextmanager
def alone_as(rank: int, world: int) -> Iterator[None]:
    """Be this rank of so many processes, none of which exist."""
    if dist.is_initialized():
        raise GalvatronError("a rehearsal needs a process of its own, but this one has joined a process group already")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    real = dist.batch_isend_irecv
    dist.batch_isend_irecv = _exchange  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.batch_isend_irecv = real
        dist.destroy_process_group()
