"""Tensor-parallel ranks inside one process: to try a split out, and to count what it sends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["LoneGroup", "simulate"]

_Result = TypeVar("_Result")
_PATIENCE_S = 60.0


class _Done(dist.Work):
    """A collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Group(dist.ProcessGroup):
    """The collectives of the runtime, by the names of several versions of torch; what they do is in ``_exchange``."""

    def _exchange(self, tensor: Tensor) -> Sequence[Tensor]:
        """The tensors of all ranks."""
        raise NotImplementedError

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Done:  # type: ignore[override]
        together = torch.stack(list(self._exchange(tensors[0])))
        largest = options is not None and options.reduceOp == dist.ReduceOp.MAX
        tensors[0].copy_(together.amax(0) if largest else together.sum(0))
        return _Done()

    def _allgather_base(self, output: Tensor, tensor: Tensor, options: Any = None) -> _Done:
        output.copy_(torch.cat(list(self._exchange(tensor))))
        return _Done()

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, options: Any = None) -> _Done:
        total = torch.stack(list(self._exchange(tensor))).sum(0)
        output.copy_(total.chunk(self.size())[self.rank()])
        return _Done()

    all_gather_single = all_gather_into_tensor = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base  # type: ignore[assignment]


class LoneGroup(_Group):
    """The first rank of a group without the others, who would send what it sends. Counts the bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]
        self.reduced_bytes = 0
        """Of all-reduces."""
        self.gathered_bytes = 0
        """Of all-gathers and reduce-scatters, as whole messages."""

    def _exchange(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor] * self.size()

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Done:  # type: ignore[override]
        self.reduced_bytes += tensors[0].numel() * tensors[0].element_size()
        return _Done()

    def _allgather_base(self, output: Tensor, tensor: Tensor, options: Any = None) -> _Done:
        self.gathered_bytes += output.numel() * output.element_size()
        return super()._allgather_base(output, tensor, options)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, options: Any = None) -> _Done:
        self.gathered_bytes += tensor.numel() * tensor.element_size()
        return super()._reduce_scatter_base(output, tensor, options)

    all_gather_single = all_gather_into_tensor = _allgather_base
    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base


class _ThreadGroup(_Group):
    """One of several ranks that are threads."""

    def __init__(self, rank: int, box: list[Tensor | None], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(box))  # type: ignore[call-arg]
        self._box, self._barrier = box, barrier

    def _exchange(self, tensor: Tensor) -> Sequence[Tensor]:
        self._box[self.rank()] = tensor.clone()
        self._barrier.wait(_PATIENCE_S)
        found = [own for own in self._box if own is not None]
        self._barrier.wait(_PATIENCE_S)
        return found


def simulate(ranks: int, run: Callable[[dist.ProcessGroup], _Result]) -> list[_Result]:
    """What ``run`` returns on each of so many ranks, which are threads. Raises the first error of any of them."""
    box: list[Tensor | None] = [None] * ranks
    barrier = threading.Barrier(ranks)
    results: list[_Result | None] = [None] * ranks
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = run(_ThreadGroup(rank, box, barrier))
        except threading.BrokenBarrierError:
            pass  # another rank has failed
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
