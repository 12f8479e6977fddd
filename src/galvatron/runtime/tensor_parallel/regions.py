"""The split part of a layer: the modules that tensor parallelism puts in place of stock ones.

A region is a stock module whose inputs are whole on each rank (or, with sequence parallelism, divided along the
sequence) and whose weights are split. All projections of one input are computed together when the region is entered:
in backward the sum of the input's gradient (Megatron's f) then travels while the weights' gradients are computed.
Projections outside of regions are computed together when the first of them is called (``Readers``).
Knows the operators; which modules are replaced is in ``tensor_parallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from galvatron.families.lora import Adapter
from galvatron.runtime import collectives
from galvatron.runtime.tensor_parallel import operators

__all__ = ["Adapted", "Entrance", "Readers", "SplitColumns", "SplitRows"]


class _Split(nn.Module):
    """A projection whose weight is split; ``transposed`` for a ``Conv1D``, whose weight is (inputs, outputs)."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: ProcessGroup, *, transposed: bool
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.group, self.transposed = group, transposed
        self.adapter: Callable[[], Adapter] | None = None

    @property
    def matrix(self) -> Tensor:
        return self.weight.t() if self.transposed else self.weight


class Adapted(nn.Module):
    """A split projection with its low-rank adapter, under peft's names: W x + scaling · B A x.

    Behind columns, A is whole and B split by rows. Behind rows, A is split by columns and B whole: the product of B and
    a rank's part of A x is a part of the sum that is made anyway.
    """

    def __init__(self, projection: _Split, adapter: Adapter) -> None:
        super().__init__()
        self.base_layer = projection
        self.lora_A = nn.ModuleDict({"default": adapter.down})
        self.lora_B = nn.ModuleDict({"default": adapter.up})
        projection.adapter = lambda: adapter

    @property
    def weight(self) -> Tensor:
        """For models that ask a projection for the type of its weight."""
        return self.base_layer.weight

    def forward(self, tensor: Tensor) -> Tensor:
        output: Tensor = self.base_layer(tensor)
        return output


class SplitColumns(_Split):
    """Each rank computes its own output features: when the region around it is entered, or with its readers."""

    readers: Readers | None = None
    """Those that read the same tensor; None: it is in a region."""
    gathered = False

    def forward(self, entered: Tensor) -> Tensor:
        if self.readers is not None:
            output = self.readers.output(self, entered)
        else:
            outputs: dict[SplitColumns, Tensor] = entered.projected  # type: ignore[attr-defined]
            output = outputs.pop(self)
        return operators.gather_features(output, self.group) if self.gathered else output


class Readers:
    """Projections outside of regions that read one tensor: the first one called computes them all.

    Should one of them be called with another tensor after all, it is computed from that.
    """

    def __init__(self, members: Sequence[SplitColumns]) -> None:
        self._members = members
        self._read: Tensor | None = None
        self._outputs: dict[SplitColumns, Tensor] = {}

    def output(self, member: SplitColumns, tensor: Tensor) -> Tensor:
        if self._read is not tensor or member not in self._outputs:
            self._read, self._outputs = tensor, _project(tensor, member.group, self._members)
        output = self._outputs.pop(member)
        if not self._outputs:
            self._read = None
        return output


class SplitRows(_Split):
    """Each rank computes a partial sum of all output features; the bias is added once, after the sum."""

    sequence = False
    takes_whole = False

    def forward(self, tensor: Tensor) -> Tensor:
        if self.takes_whole:
            tensor = operators.slice_features(tensor, self.group)
        partial = functional.linear(tensor, self.matrix)
        if self.adapter is not None:
            own = self.adapter()
            low = functional.linear(tensor, own.down.weight)
            partial = partial + own.scaling * functional.linear(low, own.up.weight)
        reduce_from_region = operators.sum_sequence if self.sequence else operators.reduce_from_region
        total = reduce_from_region(partial, self.group)
        return total if self.bias is None else total + self.bias


class Entrance:
    """Hooks of one region."""

    def __init__(
        self,
        group: ProcessGroup,
        readers: dict[str, Sequence[SplitColumns]],
        *,
        sequence: bool,
        on_enter: Callable[[], None] | None,
        on_leave: Callable[[], None] | None,
    ) -> None:
        """``readers``: for each argument that enters, the projections that read it; the first is passed by position or
        by name."""
        self._group, self._readers, self._sequence = group, readers, sequence
        self._on_enter, self._on_leave = on_enter, on_leave

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        if self._on_leave is not None:
            module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._on_enter is not None:
            self._on_enter()
        if args:
            args = (self._entered(args[0], next(iter(self._readers))), *args[1:])
        named = {
            name: self._entered(value, name) if name in self._readers and isinstance(value, Tensor) else value
            for name, value in kwargs.items()
        }
        return args, named

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert self._on_leave is not None
        self._on_leave()

    def _entered(self, value: Tensor, argument: str) -> Tensor:
        """Stands for the input inside the region: has its shape, and the projections that were made of it."""
        projected = _project(value, self._group, self._readers[argument], sequence=self._sequence)
        shape = list(value.shape)
        if self._sequence:
            shape[1] *= self._group.size()
        # Whatever else would read it gets no numbers, rather than ones without a gradient.
        stand_in = value.new_full((), torch.nan).expand(shape)
        stand_in.projected = projected  # type: ignore[attr-defined]
        return stand_in


def _project(
    tensor: Tensor, group: ProcessGroup, readers: Sequence[SplitColumns], *, sequence: bool = False
) -> dict[SplitColumns, Tensor]:
    adapters = [None if reader.adapter is None else reader.adapter() for reader in readers]
    parameters = [parameter for reader in readers for parameter in (reader.matrix, reader.bias)]
    for adapter in adapters:
        parameters += [] if adapter is None else [adapter.down.weight, None]
    outputs = list(_Projections.apply(tensor, group, sequence, *parameters))
    projected = dict(zip(readers, outputs, strict=False))
    low = iter(outputs[len(readers) :])
    for reader, adapter in zip(readers, adapters, strict=True):
        if adapter is not None:
            added = functional.linear(next(low), adapter.up.weight)
            projected[reader] = projected[reader] + adapter.scaling * added
    return projected


class _Projections(torch.autograd.Function):
    """Linear projections of one input into split features.

    Backward sums the input's gradient over the group beside the weights' gradients. With sequence parallelism only this
    rank's part of the input is kept; it is gathered again beside the input's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: ProcessGroup, sequence: bool, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.group, ctx.sequence = group, sequence
        # What no gradient needs is not kept: the input where the weights are frozen.
        entered, trained = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3::2])
        ctx.save_for_backward(tensor if trained else None, *(weight if entered else None for weight in weights))
        whole = operators.gathered(tensor, group) if sequence else tensor
        pairs = zip(weights, biases, strict=True)
        return tuple(functional.linear(whole, weight, bias) for weight, bias in pairs if weight is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensor, *weights = ctx.saved_tensors
        entered, trained = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        reads = any(trained[::2])  # for the gradient of a weight
        again = operators.SequenceAllGather(tensor, ctx.group) if ctx.sequence and reads else None
        total: operators.SequenceReduceScatter | collectives.AllReduce | None = None
        if entered:
            by_input = gradients[0] @ weights[0]
            for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
                by_input += gradient @ weight
            total = (
                operators.SequenceReduceScatter(by_input, ctx.group)
                if ctx.sequence
                else collectives.AllReduce(by_input, ctx.group)
            )
            del by_input
        whole = (tensor if again is None else again.result()).flatten(0, -2) if reads else None
        by_parameters: list[Tensor | None] = []
        for gradient, weight_trained, bias_trained in zip(gradients, trained[::2], trained[1::2], strict=True):
            flat = gradient.flatten(0, -2)
            by_parameters.append(flat.t() @ whole if weight_trained and whole is not None else None)
            by_parameters.append(flat.sum(0) if bias_trained else None)
        return None if total is None else total.result(), None, None, *by_parameters
