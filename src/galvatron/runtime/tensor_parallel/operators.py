"""The operators of tensor parallelism with their gradients: Megatron's f and g, and those of sequence parallelism.

Each takes local tensors and the tensor-parallel group. Sequence is dim 1 of an activation (rows, tokens, features).
Where ``torch.compile`` traces a layer, an operator is one node of its graph: collectives are not for a compiler.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.distributed import ProcessGroup

from galvatron.core.errors import InvalidInput
from galvatron.runtime import collectives
from galvatron.runtime.selective import SENT, keeping

__all__ = [
    "Operator",
    "SequenceAllGather",
    "SequenceReduceScatter",
    "copy_to_region",
    "gather_features",
    "gather_sequence",
    "gather_to_region",
    "gathered",
    "node",
    "reduce_from_region",
    "slice_features",
    "slice_sequence",
    "sum_sequence",
]


class SequenceAllGather:
    """All tokens of a tensor divided along the sequence, under way; no gradient."""

    def __init__(self, part: Tensor, group: ProcessGroup) -> None:
        self._shape, self._ranks = part.shape, group.size()
        self._pieces = collectives.AllGather(part, group)

    def result(self) -> Tensor:
        rows, tokens, *tail = self._shape
        pieces = self._pieces.result().view(self._ranks, rows, tokens, *tail)
        return pieces.transpose(0, 1).reshape(rows, self._ranks * tokens, *tail)


class SequenceReduceScatter:
    """This rank's tokens of the sum over the group, under way; no gradient."""

    def __init__(self, whole: Tensor, group: ProcessGroup) -> None:
        rows, tokens, *tail = whole.shape
        pieces = whole.view(rows, group.size(), tokens // group.size(), *tail).transpose(0, 1)
        joined = pieces.reshape(group.size() * rows, tokens // group.size(), *tail)
        self._part = collectives.ReduceScatter(joined, group)

    def result(self) -> Tensor:
        return self._part.result()


def gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    """All tokens of a tensor divided along the sequence; no gradient."""
    return SequenceAllGather(part, group).result()


def sliced(whole: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's tokens; no gradient."""
    if whole.shape[1] % group.size():
        raise InvalidInput(
            f"batch: sequences of {whole.shape[1]} tokens cannot be divided over {group.size()} ranks, as +sp would; "
            "pad them to a multiple"
        )
    tokens = whole.shape[1] // group.size()
    return _copied(whole.narrow(1, group.rank() * tokens, tokens))


def _copied(part: Tensor) -> Tensor:
    """A part in memory of its own. Of a single row a part is contiguous as it is: a view, which would keep the whole
    alive for as long as backward needs it."""
    return part.clone(memory_format=torch.contiguous_format)


def _summed_in_place(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return collectives.all_reduce(tensor, group)


def _summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return collectives.all_reduce(tensor.clone(), group)


def _same(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


def _summed_part(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return SequenceReduceScatter(tensor.contiguous(), group).result()


def _all_features(part: Tensor, group: ProcessGroup) -> Tensor:
    pieces = collectives.all_gather(part.movedim(-1, 0), group)
    return pieces.movedim(0, -1).contiguous()


def _own_features(whole: Tensor, group: ProcessGroup) -> Tensor:
    each = whole.shape[-1] // group.size()
    return _copied(whole.narrow(-1, group.rank() * each, each))


_Function = Callable[[Tensor, ProcessGroup], Tensor]


def node(name: str, schema: str, *, sends: bool = False) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a function a node of compiled graphs, which changes nothing that it is given. ``sends``: it communicates in
    forward, and a layer that is recomputed with some results kept keeps its result.

    PyTorch keeps compiled graphs on disk and knows nodes by name alone, so the name changes with what a node takes:
    a graph that an earlier version compiled is never run with this one's nodes.
    """
    known = f"galvatron::{SENT if sends else ''}{name}_{zlib.crc32(schema.encode()):08x}"
    return lambda function: torch.library.custom_op(known, function, mutates_args=(), schema=schema)


class Operator:
    """A function of a local tensor and a group, with its gradient."""

    def __init__(self, name: str, forward: _Function, backward: _Function, grows: tuple[int, int]) -> None:
        """``grows``: the dim that forward makes longer or shorter, and whether it multiplies its length by the number
        of ranks (1), divides it (-1) or leaves it (0)."""
        self.forward, self.backward, self._grows = forward, backward, grows
        self._sends = forward not in (_same, _own_features, sliced)
        self._node = self._traced(name)

    def __call__(self, tensor: Tensor, group: ProcessGroup) -> Tensor:
        result: Tensor
        if torch.compiler.is_compiling() or (self._sends and keeping()):
            result = self._node(tensor, group.group_name)
        else:
            result = _Apply.apply(tensor, group, self)
        return result

    def _traced(self, name: str) -> Any:
        """The node of a compiled graph. It neither changes nor returns what it is given."""

        def forward(tensor: Tensor, group: str) -> Tensor:
            return self.forward(tensor.clone(), collectives.group_named(group))

        def backward(gradient: Tensor, group: str) -> Tensor:
            return self.backward(gradient.clone(), collectives.group_named(group))

        def empty(tensor: Tensor, group: str, sign: int) -> Tensor:
            dim, power = self._grows
            shape, ranks = list(tensor.shape), collectives.group_named(group).size()
            if sign * power > 0:
                shape[dim] = shape[dim] * ranks
            elif sign * power < 0:
                shape[dim] = shape[dim] // ranks
            return tensor.new_empty(shape)

        schema = "(Tensor tensor, str group) -> Tensor"
        there = node(name, schema, sends=self._sends)(forward)
        back = node(f"{name}_backward", schema)(backward)
        there.register_fake(lambda tensor, group: empty(tensor, group, 1))
        back.register_fake(lambda tensor, group: empty(tensor, group, -1))
        there.register_autograd(
            lambda ctx, gradient: (back(gradient, ctx.group), None),
            setup_context=lambda ctx, inputs, output: setattr(ctx, "group", inputs[1]),
        )
        return there


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, operator: Operator) -> Tensor:
        ctx.group, ctx.operator = group, operator
        result = operator.forward(tensor, group)
        if result is tensor:
            ctx.mark_dirty(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.operator.backward(gradient, ctx.group), None, None


copy_to_region = Operator("copy_to_region", _same, _summed, (0, 0))
"""f: into the split part; the gradients that all ranks' parts give are summed."""
reduce_from_region = Operator("reduce_from_region", _summed_in_place, _same, (0, 0))
"""g: out of the split part; partial results of all ranks are summed."""
gather_features = Operator("gather_features", _all_features, _own_features, (-1, 1))
"""All features (the last dim). Every rank then computes the same, so backward just slices."""
slice_features = Operator("slice_features", _own_features, _all_features, (-1, -1))
"""This rank's features of what is whole on each; backward gathers."""
sum_sequence = Operator("sum_sequence", _summed_part, gathered, (1, -1))
"""g with sequence parallelism: partial results are summed, each rank keeps its part of the tokens."""
gather_to_region = Operator("gather_to_region", gathered, _summed_part, (1, 1))
"""f with sequence parallelism: all tokens, into the split part; gradients are summed, each rank keeps its tokens'."""
gather_sequence = Operator("gather_sequence", gathered, sliced, (1, 1))
"""Out of sequence parallelism: all tokens. Every rank then computes the same, so backward just slices."""
slice_sequence = Operator("slice_sequence", sliced, gathered, (1, -1))
"""Into sequence parallelism: this rank's tokens; backward gathers."""
