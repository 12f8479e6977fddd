"""Counts what this process sends and receives: every collective and message of torch.distributed, by its bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Sent", "Traffic", "one_by_one"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective or message."""

    operation: str
    """"all_reduce", "all_gather", "reduce_scatter", "send" or "receive"."""
    size: int
    """Bytes of the whole message: what is reduced, what is there after a gather, what is scattered."""
    group: int
    """Ranks that take part; 2 for a message from rank to rank."""

    @property
    def volume(self) -> float:
        """Bytes that a rank receives in a ring: a reduction and a gather move (g − 1)/g of the message each."""
        if self.operation == "send":
            return 0.0
        if self.operation == "receive":
            return float(self.size)
        passes = 2 if self.operation == "all_reduce" else 1
        return passes * self.size * (self.group - 1) / self.group


_NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "send": "send",
    "recv_": "receive",
}


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes everything that goes out of or into this process."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self._note(function._schema.name.partition("::")[2], args)
        return function(*args, **(kwargs or {}))

    def _note(self, operation: str, args: Any) -> None:
        if operation in ("monitored_barrier_", "barrier"):
            return
        name = _NAMES[operation]  # a KeyError is a collective that nobody counts yet
        tensors = tree_leaves(args[0])
        if name == "reduce_scatter":
            tensors = [args[1]]
        size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        group = 2 if name in ("send", "receive") else ProcessGroup.unbox(args[1 if name == "all_reduce" else 2]).size()
        self.sent.append(Sent(name, size, group))

    def of(self, operation: str) -> list[Sent]:
        return [one for one in self.sent if one.operation == operation]

    @property
    def volume(self) -> float:
        return sum(one.volume for one in self.sent)


def one_by_one(
    model: Any, batch: dict[str, Tensor], noting: Callable[[], AbstractContextManager[T]]
) -> list[tuple[T, T]]:
    """On a rank: layer after layer, each forward and backward by itself, and what was noted of either."""
    micro_batch = model._reader.local(batch).micro_batches[0]
    stage = model._pipeline.stage
    activations: tuple[Tensor, ...] = ()
    found = []
    for slot, portion, change in zip(stage.stage_layers, stage._portions, stage._changes, strict=True):
        changed = activations if change is None else change(activations)
        inputs = tuple(tensor.detach().requires_grad_() for tensor in changed)
        with noting() as forward:
            activations = slot(inputs, micro_batch.context(portion), (0, 0))
        with noting() as backward:
            torch.autograd.backward(activations, tuple(torch.ones_like(tensor) for tensor in activations))
        found.append((forward, backward))
    return found
