"""What a block saves for backward where it is compiled: PyTorch's own partitioner divides its graph.

A compiler computes cheap operations again in backward instead of keeping their results (the steps of a norm, a gate's
factors), so that a compiled block saves less than autograd does operation by operation.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from galvatron.measure.work import bytes_of, storage_of

__all__ = ["saved_when_compiled"]

_LOG = logging.getLogger(__name__)


def saved_when_compiled(
    block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], left_out: Set[int]
) -> int | None:
    """Bytes that the compiled block saves of what it computes and is given; None: its graph cannot be traced in one
    piece.

    Parameters and buffers do not count, nor what it hands on, which the next layer saves, nor inputs whose memory is
    ``left_out``. Where the tensors are fake, nothing is computed.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    values, structure = tree_flatten((args, dict(kwargs)))
    places = [place for place, own in enumerate(values) if isinstance(own, Tensor)]
    tensors = [values[place] for place in places]
    held = dict(block.named_parameters(remove_duplicate=False)) | dict(block.named_buffers(remove_duplicate=False))
    forwards: list[fx.GraphModule] = []

    def run(held: dict[str, Tensor], tensors: list[Tensor]) -> Any:
        filled = list(values)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        positional, named = tree_unflatten(filled, structure)
        made = torch.func.functional_call(block, held, positional, named)
        return made if isinstance(made, Tensor) else made[0]

    def forward(gm: fx.GraphModule, example_inputs: Any) -> Any:
        forwards.append(gm)
        return gm

    traced = aot_function(
        run,
        fw_compiler=forward,
        bw_compiler=lambda graph, _: graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    try:
        traced(held, tensors)
    except Exception as error:
        _LOG.debug("%s: %s: %s", type(block).__name__, type(error).__name__, error)
        return None
    if len(forwards) != 1:
        return None
    counted = [False] * len(held) + [storage_of(own) not in left_out for own in tensors]
    return _saved(forwards[0].graph, counted)


def _saved(graph: fx.Graph, counted: list[bool]) -> int:
    inputs = graph.find_nodes(op="placeholder")
    outside = {node for place, node in enumerate(inputs) if place >= len(counted) or not counted[place]}
    results: Any = graph.output_node().args[0]
    handed_on, *kept = (own for own in results if isinstance(own, fx.Node))
    own = {_source(node) for node in kept} - outside - {_source(handed_on)}
    return sum(bytes_of(node.meta["val"]) for node in own if isinstance(node.meta["val"], Tensor))


def _source(node: fx.Node) -> fx.Node:
    """What a view, or one of the views that a division makes, is a view of."""
    while True:
        made = node.args[0] if node.target is operator.getitem else node
        if not isinstance(made, fx.Node) or not isinstance(made.target, torch._ops.OpOverload):
            return node
        if not made.target.is_view:
            return node
        node = next(own for own in made.args if isinstance(own, fx.Node))
