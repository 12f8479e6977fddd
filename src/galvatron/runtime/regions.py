"""Entering and leaving the split part of a layer: the modules that tensor parallelism puts in place of stock ones.

A region is a stock module whose inputs are whole on each rank (or, with sequence parallelism, divided along the
sequence) and whose weights are split. Knows the operators; which modules are replaced is in ``tensor_parallel``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from galvatron.runtime import operators

__all__ = ["Entrance", "SplitColumns", "SplitRows"]


class Entrance:
    """Hooks of one region."""

    def __init__(
        self,
        group: ProcessGroup,
        arguments: tuple[str, ...],
        *,
        sequence: bool,
        on_enter: Callable[[], None] | None,
        on_leave: Callable[[], None] | None,
    ) -> None:
        self.group = group
        self.arguments = arguments
        self.sequence = sequence
        self._on_enter, self._on_leave = on_enter, on_leave

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        if self._on_leave is not None:
            module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._on_enter is not None:
            self._on_enter()
        if args:
            args = (self._entered(args[0]), *args[1:])
        named = {name: self._entered(value) if name in self.arguments else value for name, value in kwargs.items()}
        return args, named

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert self._on_leave is not None
        self._on_leave()

    def _entered(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if not self.sequence:
            return operators.enter(value, self.group)
        gathered: Tensor = _EnterSequence.apply(value, self.group)
        gathered.entry = _Entry(value.detach(), self.group)  # type: ignore[attr-defined]
        return gathered


class _Entry:
    """Where a tensor that was gathered along the sequence came from, so that it need not be kept for backward."""

    def __init__(self, part: Tensor, group: ProcessGroup) -> None:
        self.part = part
        self.again = _Again(group)


class _Again:
    """The same tensor gathered once more, for the gradients of all weights that used it. Holds no tensor in between."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._uses = 0
        self._whole: Tensor | None = None

    def expect(self) -> None:
        self._uses += 1

    def gathered(self, part: Tensor) -> Tensor:
        """For the gradient of one weight; the last one lets go of it."""
        whole = operators.gathered(part, self._group) if self._whole is None else self._whole
        self._uses -= 1
        self._whole = whole if self._uses else None
        return whole


class _EnterSequence(torch.autograd.Function):
    """f with sequence parallelism: all tokens enter; in backward gradients are summed and divided again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return operators.gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return operators.summed(gradient.contiguous(), ctx.group), None


class _RegatheringLinear(torch.autograd.Function):
    """A linear projection that keeps this rank's part of its input and gathers it again in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None, part: Tensor, again: _Again) -> Tensor:
        again.expect()
        ctx.again, ctx.biased = again, bias is not None
        ctx.save_for_backward(weight, part)
        return functional.linear(tensor, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        weight, part = ctx.saved_tensors
        tensor = ctx.again.gathered(part)
        flat = gradient.flatten(0, -2)
        by_bias = flat.sum(0) if ctx.biased else None
        return gradient @ weight, flat.t() @ tensor.flatten(0, -2), by_bias, None, None


class _Split(nn.Module):
    """A projection whose weight is split; ``transposed`` for a ``Conv1D``, whose weight is (inputs, outputs)."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: ProcessGroup, *, transposed: bool
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.transposed = group, transposed

    @property
    def matrix(self) -> Tensor:
        return self.weight.t() if self.transposed else self.weight


class SplitColumns(_Split):
    """Each rank computes its own output features."""

    def forward(self, tensor: Tensor) -> Tensor:
        entry: _Entry | None = getattr(tensor, "entry", None)
        if entry is None:
            return functional.linear(tensor, self.matrix, self.bias)
        output: Tensor = _RegatheringLinear.apply(tensor, self.matrix, self.bias, entry.part, entry.again)
        return output


class SplitRows(_Split):
    """Each rank computes a partial sum of all output features; the bias is added once, after the sum."""

    sequence = False

    def forward(self, tensor: Tensor) -> Tensor:
        partial = functional.linear(tensor, self.matrix)
        leave = operators.sum_sequence if self.sequence else operators.leave
        total = leave(partial, self.group)
        return total if self.bias is None else total + self.bias
