"""What a forward pass of fake tensors does: operations, and what it saves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from galvatron.families.generic.stubs import GROUPED
from galvatron.runtime.selective import Grade, is_kept

__all__ = ["FUSED_FLOPS", "Decided", "Work", "again_flops", "bytes_of", "storage_of", "tensors_in"]


class Decided(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Questions that a model asks about values are answered with no: whether to leave out a block (it never is), or
    whether a mask is needed that the example does not need."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return False
        return function(*args, **(kwargs or {}))


class Work(TorchDispatchMode):
    """What a forward pass does: operations, bytes saved for backward, bytes of its largest operation in and out."""

    def __init__(self, parameters: Iterable[Tensor], given: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        """At first of experts alone: torch's counter knows the others."""
        self.largest = 0
        self.operations = 0
        self._left_out = given | {storage_of(own) for own in parameters}
        self._saved: dict[int, Tensor] = {}
        self._results: list[tuple[bool, int, int]] = []
        """Of what selective recompute keeps, in order: whether it is attention's, its bytes, and its operations."""
        self._needed = 0
        """Of these, how many come before something that is saved."""

    @property
    def saved(self) -> int:
        return sum(own.untyped_storage().nbytes() for own in self._saved.values())

    def kept(self, grade: Grade) -> int:
        """Bytes of the results that this grade of recompute keeps."""
        return sum(size for attends, size, _ in self._results[: self._needed] if attends or grade is Grade.PRODUCTS)

    @property
    def unneeded_flops(self) -> int:
        """Operations of the products behind all that is saved, which recompute does not come to."""
        return sum(flops for _, _, flops in self._results[self._needed :])

    @property
    def products(self) -> int:
        """How many results selective recompute keeps."""
        return self._needed

    def pack(self, tensor: Tensor) -> Tensor:
        self._needed = len(self._results)
        if storage_of(tensor) not in self._left_out:
            self._saved.setdefault(storage_of(tensor), tensor)
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = self._experts(*args) if str(function) in GROUPED else function(*args, **(kwargs or {}))
        taken = {storage_of(own): own for own in tensors_in((args, kwargs))}
        new = [own for own in tensors_in(made) if storage_of(own) not in taken]
        self.operations += 1
        if new:
            inputs = [own for place, own in taken.items() if place not in self._left_out]
            if is_kept(function, Grade.PRODUCTS):
                attends = is_kept(function, Grade.ATTENTION)
                flops = 0 if attends else _product_flops(new, args)
                self._results.append((attends, sum(map(bytes_of, new)), flops))
            self.largest = max(self.largest, sum(bytes_of(own) for own in (*new, *inputs) if own.is_floating_point()))
        return made

    def _experts(self, rows: Tensor, weights: Tensor, *_: Any) -> Tensor:
        """Each row times the matrix of its expert: torch has neither shapes for all types nor counts for it."""
        self.flops += 2 * rows.numel() * weights.shape[-1]
        return rows.new_empty(*rows.shape[:-1], weights.shape[-1])


def _product_flops(made: list[Tensor], args: Any) -> int:
    """Of a product of rows and a matrix, after a bias or not."""
    rows = next(own for own in reversed(args[:-1]) if isinstance(own, Tensor) and own.ndim > 1)
    return 2 * sum(own.numel() for own in made) * rows.shape[-1]


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors among nested values."""
    return [own for own in tree_flatten(values)[0] if isinstance(own, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: Tensor) -> int:
    """The size of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _attention_flops(
    query: list[int], key: list[int], value: list[int], dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    """Of the fused kernel on CPUs, which torch's counter does not know: two products, half of each if causal."""
    *heads, queries, width = query
    return 2 * math.prod(heads) * queries * key[-2] * (width + value[-1]) // (2 if causal else 1)


def again_flops(counter: FlopCounterMode, grade: Grade) -> int:
    """Of the operations that torch's counter found, those that this grade of recompute does again."""
    by_operation: dict[Any, int] = dict(counter.get_flop_counts().get("Global", {}))
    return sum(
        count
        for packet, count in by_operation.items()
        if not any(is_kept(getattr(packet, name), grade) for name in packet.overloads())
    )


FUSED_FLOPS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
