"""Data parallelism with whole parameters (DP, and layers under TP alone or on one device).

Gradients of the last micro-batch's backward are summed as soon as all of a layer's are there, beside the backward of
the layers before it. Nothing is stored twice: gradients live in one flat buffer a layer, which is what is sent.
(FSDP2's ``replicate`` does the same with a second copy of all parameters from forward to backward.)
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from galvatron.runtime.collectives import finish
from galvatron.runtime.data_parallel.units import LocalParameter, Unit

__all__ = ["ReplicatedUnit"]

_CHUNK_BYTES = 25 << 20
"""Of one message: larger ones run slower over sockets, and delay what other groups send."""


class ReplicatedUnit(Unit):
    """One layer's parameters, whole on each rank of its DP group."""

    def __init__(
        self, pairs: list[tuple[LocalParameter, nn.Parameter]], group: ProcessGroup | None, *, in_the_end: bool = False
    ) -> None:
        """``pairs``: each with the parameter in the module: the master itself, or a copy of it in a narrower type.
        ``in_the_end``: its sum starts when the stage is through with the batch. A group of several stages demands that:
        activations may travel in it, and NCCL runs what a group does in the order in which each rank starts it."""
        self._in_the_end = in_the_end
        self.locals = [local for local, _ in pairs]
        self._group = group
        self._works = [work for _, work in pairs]
        self._copies = [(local, work) for local, work in pairs if work is not local.master]
        self._flat: Tensor | None = None
        self._last = False
        self._missing, self._left_out = 0, 0
        """Parameters whose gradient has not come yet, and those of which none came before the sum."""
        self._sums: list[dist.Work] = []
        for local, work in pairs:
            if work.requires_grad:
                # Weak references: a hook that holds its own parameter would keep it alive for ever.
                work.register_post_accumulate_grad_hook(partial(_accumulated, weakref.ref(self), weakref.ref(local)))

    def _take(self, local: LocalParameter, work: Tensor) -> None:
        """A parameter's gradient for one micro-batch is there."""
        local.came = True
        if work is not local.master and work.grad is not None:
            if self._flat is None and self._group is not None:
                self._attach_gradients()
            if local.master.grad is None:
                local.master.grad = work.grad.to(local.master.dtype)
            else:
                local.master.grad += work.grad
            work.grad = None
        self._missing -= 1
        if self._last and not self._missing and not self._in_the_end:
            self._start_sum()

    @torch.no_grad()
    def refresh(self) -> None:
        if self._copies:
            torch._foreach_copy_([work for _, work in self._copies], [local.master for local, _ in self._copies])

    def begin(self) -> None:
        if self._group is None or any(local.master.grad is not None for local in self.locals):
            return
        if self._copies:
            self._flat = None  # made when the first gradient is there, and with it the layer's activations gone
        else:
            self._attach_gradients()

    def _attach_gradients(self) -> None:
        """Let all gradients be views of one buffer."""
        masters = [local.master for local in self.locals if local.master.requires_grad]
        if not masters:
            return
        if self._flat is None:
            self._flat = masters[0].new_empty(sum(master.numel() for master in masters))
        self._flat.zero_()
        for master, view in zip(masters, self._flat.split([master.numel() for master in masters]), strict=True):
            master.grad = view.view_as(master)

    def end_evaluation(self) -> None:
        pass  # nothing was gathered

    def expect_backward(self, *, last: bool) -> None:
        self._last = last and self._group is not None
        self._missing = sum(work.requires_grad for work in self._works)

    def passed(self) -> None:
        if self._last and self._missing and not self._in_the_end:
            self._start_sum()

    def _start_sum(self) -> None:
        self._last, self._left_out = False, self._missing
        if self._flat is None:  # none of its parameters had a part in the loss here, but one may have elsewhere
            self._attach_gradients()
        if self._flat is not None:
            for chunk in self._flat.split(_CHUNK_BYTES // self._flat.element_size()):
                work = dist.all_reduce(chunk, group=self._group, async_op=True)
                assert work is not None
                self._sums.append(work)

    def finish(self) -> None:
        if self._last:  # it was to wait, or some parameter had no part in the loss
            self._start_sum()
        assert self._group is None or self._missing == self._left_out, "a gradient came after its layer's sum"
        finish(self._sums)
        self._sums = []


def _accumulated(unit: weakref.ref[ReplicatedUnit], local: weakref.ref[LocalParameter], work: Tensor) -> None:
    owner, parameter = unit(), local()
    if owner is not None and parameter is not None:
        owner._take(parameter, work)
