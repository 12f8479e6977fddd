"""The split part of a layer: the modules that tensor parallelism puts in place of stock ones.

A region is a stock module whose inputs are whole on each rank (or, with sequence parallelism, divided along the
sequence) and whose weights are split. All projections of one input are computed together when the region is entered:
in backward the sum of the input's gradient (Megatron's f) then travels while the weights' gradients are computed.
Projections outside of regions are computed together when the first of them is called (``Readers``).
Knows the operators; which modules are replaced is in ``tensor_parallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from galvatron.families.lora import Adapter
from galvatron.runtime import collectives
from galvatron.runtime.selective import keeping
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
    """A split projection with its low-rank adapter, under peft's names: W x + B (scaling · A x).

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
    projected: Tensor | None = None
    """In a region: its output, made when that was entered."""

    def forward(self, entered: Tensor) -> Tensor:
        if self.readers is not None:
            output = self.readers.output(self, entered)
        else:
            made = self.projected
            assert made is not None
            output, self.projected = made, None
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
            self._read = tensor
            self._outputs = dict(zip(self._members, _project(tensor, member.group, self._members), strict=True))
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
            partial = partial + functional.linear(low * own.scaling, own.up.weight)
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
        """Stands for the input inside the region: has its shape, and the projections of it were made."""
        readers = self._readers[argument]
        for reader, projected in zip(
            readers, _project(value, self._group, readers, sequence=self._sequence), strict=True
        ):
            reader.projected = projected
        shape = list(value.shape)
        if self._sequence:
            shape[1] *= self._group.size()
        # Whatever else would read it gets no numbers, rather than ones without a gradient.
        return value.new_full((), torch.nan).expand(shape)


def _project(
    tensor: Tensor, group: ProcessGroup, readers: Sequence[SplitColumns], *, sequence: bool = False
) -> Sequence[Tensor]:
    """The outputs of these projections. What adapters bring to their rank is projected with them."""
    adapters = [reader.adapter() for reader in readers if reader.adapter is not None]
    weights = [*(reader.matrix for reader in readers), *(adapter.down.weight for adapter in adapters)]
    biases = [*(reader.bias for reader in readers), *[None] * len(adapters)]
    if torch.compiler.is_compiling() or keeping():
        products = _project_node(tensor, group.group_name, sequence, weights)
        outputs = [own if bias is None else own + bias for own, bias in zip(products, biases, strict=True)]
    else:
        outputs = list(_Projections.apply(tensor, group, sequence, *weights, *biases))
    adapted = [place for place, reader in enumerate(readers) if reader.adapter is not None]
    for place, adapter, low in zip(adapted, adapters, outputs[len(readers) :], strict=True):
        outputs[place] = outputs[place] + functional.linear(low * adapter.scaling, adapter.up.weight)
    return outputs[: len(readers)]


def _projected(
    tensor: Tensor, group: ProcessGroup, sequence: bool, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """Linear projections of one input into split features."""
    whole = operators.gathered(tensor, group) if sequence else tensor
    return [functional.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@dataclass(frozen=True, slots=True)
class _Needed:
    """Which gradients somebody needs: parameters may be frozen, and nothing before may train."""

    entered: bool
    """That of the input."""
    weights: Sequence[bool]


def _projected_backward(
    tensor: Tensor | None,
    group: ProcessGroup,
    sequence: bool,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    needed: _Needed,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the input and of the weights.

    The input's is summed over the group beside the weights'. With sequence parallelism only this rank's part of the
    input was kept; it is gathered again beside the input's gradient.
    """
    reads = any(needed.weights) and tensor is not None
    again = operators.SequenceAllGather(tensor, group) if sequence and reads and tensor is not None else None
    total: operators.SequenceReduceScatter | collectives.AllReduce | None = None
    if needed.entered:
        by_input = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            by_input += gradient @ weight
        total = operators.SequenceReduceScatter(by_input, group) if sequence else collectives.AllReduce(by_input, group)
        del by_input
    by_weights: list[Tensor | None] = [None] * len(gradients)
    if reads and tensor is not None:
        whole = (tensor if again is None else again.result()).flatten(0, -2)
        by_weights = [
            gradient.flatten(0, -2).t() @ whole if trained else None
            for gradient, trained in zip(gradients, needed.weights, strict=True)
        ]
    return None if total is None else total.result(), by_weights


class _Projections(torch.autograd.Function):
    """Linear projections of one input into split features; parameters: all weights, then all biases."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: ProcessGroup, sequence: bool, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = [own for own in parameters[:count] if own is not None], parameters[count:]
        ctx.group, ctx.sequence, ctx.count = group, sequence, count
        # What no gradient needs is not kept: the input where the weights are frozen.
        entered, trained = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3 : 3 + count])
        ctx.save_for_backward(tensor if trained else None, *(weight if entered else None for weight in weights))
        return tuple(_projected(tensor, group, sequence, weights, biases))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensor, *weights = ctx.saved_tensors
        trained = ctx.needs_input_grad[3:]
        needed = _Needed(ctx.needs_input_grad[0], trained[: ctx.count])
        total, by_weights = _projected_backward(tensor, ctx.group, ctx.sequence, weights, gradients, needed)
        by_biases = [
            own.flatten(0, -2).sum(0) if wanted else None
            for own, wanted in zip(gradients, trained[ctx.count :], strict=True)
        ]
        return total, None, None, *by_weights, *by_biases


# The same, without biases, as one node of a compiled graph.


@operators.node(
    "project",
    "(Tensor tensor, str group, bool sequence, Tensor[] weights) -> Tensor[]",
)
def _project_node(tensor: Tensor, group: str, sequence: bool, weights: Sequence[Tensor]) -> list[Tensor]:
    return _projected(tensor, collectives.group_named(group), sequence, weights, [None] * len(weights))


@_project_node.register_fake
def _(tensor: Tensor, group: str, sequence: bool, weights: Sequence[Tensor]) -> list[Tensor]:
    shape = list(tensor.shape[:-1])
    if sequence:
        shape[1] *= collectives.group_named(group).size()
    return [tensor.new_empty((*shape, len(weight))) for weight in weights]


@operators.node(
    "backward_of_project",
    "(Tensor tensor, str group, bool sequence, Tensor[] weights, Tensor[] gradients, bool[] needed) -> Tensor[]",
)
def _backward_node(
    tensor: Tensor,
    group: str,
    sequence: bool,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor]:
    """Nothing, of no size, for what nobody needs: of the input first, then of the weights."""
    wanted = _Needed(needed[0], needed[1:])
    named = collectives.group_named(group)
    by_input, by_weights = _projected_backward(tensor, named, sequence, weights, gradients, wanted)
    return [tensor.new_empty(0) if own is None else own for own in (by_input, *by_weights)]


@_backward_node.register_fake
def _(
    tensor: Tensor,
    group: str,
    sequence: bool,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor]:
    whole = zip((tensor, *weights), needed, strict=True)
    return [own.new_empty(own.shape if wanted else 0) for own, wanted in whole]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensor, ctx.group, ctx.sequence, weights = inputs
    ctx.needed = [tensor.requires_grad, *(weight.requires_grad for weight in weights)]
    ctx.save_for_backward(tensor, *weights)


def _give_back(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    tensor, *weights = ctx.saved_tensors
    found = _backward_node(tensor, ctx.group, ctx.sequence, weights, gradients, ctx.needed)
    by_input, *by_weights = (own if wanted else None for own, wanted in zip(found, ctx.needed, strict=True))
    return by_input, None, None, by_weights


_project_node.register_autograd(_give_back, setup_context=_keep)
