"""Products with narrow matrices, such as adapters': in compiled graphs those that belong together become one.

A product of a wide matrix with one of 16 columns takes as long as it takes to read the wide one. Queries, keys and
values read the same, so that the adapters beside them would read it three times in forward and three times for their
gradients, and would write three wide gradients that are then added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_map

__all__ = ["merge"]

_NARROW = 64
"""At most so many columns: a product with more of them takes longer to compute than to read."""
_ALIGNED_BYTES = 16
"""Kernels want it of what they read, here of parts of a merged product."""

_MM, _ADD, _CAT = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, torch.ops.aten.cat.default
_SLICE, _PERMUTE, _RESHAPE = torch.ops.aten.slice.Tensor, torch.ops.aten.permute.default, torch.ops.aten.reshape.default
_RESHAPES = (_RESHAPE, torch.ops.aten.view.default)


def merge(graph: fx.Graph) -> None:
    """Merge what can be in a graph of forward or of backward."""
    for shared in (0, 1):
        for group in _sharing(graph, shared):
            _merge_sharing(graph, group, shared)
    for total in [node for node in graph.nodes if _is_sum(node)]:
        if not any(_is_part(total, user) for user in total.users):
            _merge_added(graph, total)
    graph.eliminate_dead_code()


def _sharing(graph: fx.Graph, shared: int) -> list[list[fx.Node]]:
    """Products that have the same left (0) or right (1) operand, and are narrow by the other."""
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=_MM):
        wide: Any = node.args[shared]
        if not _is_narrow(node, 1 - shared) or _is_narrow(wide, 0) or _is_narrow(wide, 1):
            continue
        if _shape(node)[1 - shared] * node.meta["val"].element_size() % _ALIGNED_BYTES == 0:
            found[wide].append(node)
    return [group for group in found.values() if len(group) > 1]


def _merge_sharing(graph: fx.Graph, group: list[fx.Node], shared: int) -> None:
    """One product with the narrow matrices side by side; each of those before has its part of it."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    wide: Any = group[0].args[shared]
    upright = [_transposed(node.args[1 - shared]) for node in group]
    if any(source in group for source, _ in upright):
        return  # one is made of another
    last = max((wide, *(source for source, _ in upright)), key=order.__getitem__)
    if any(order[user] <= order[last] for node in group for user in node.users):
        return  # one is used before all can be computed
    while last.next.op == "placeholder":
        last = last.next
    with graph.inserting_before(last.next):  # at once, so that nothing is held for longer than it was
        rows = [source if done else _call(graph, _PERMUTE, source, [1, 0]) for source, done in upright]
        beside = _call(graph, _PERMUTE, _call(graph, _CAT, rows, shared), [1, 0])
        merged = _call(graph, _MM, *((wide, beside) if shared == 0 else (beside, wide)))
        begin = 0
        for node in group:
            end = begin + _shape(node)[1 - shared]
            node.replace_all_uses_with(_call(graph, _SLICE, merged, 1 - shared, begin, end))
            begin = end


def _merge_added(graph: fx.Graph, total: fx.Node) -> None:
    """Of the products in a sum those of narrow matrices as one: their columns, and their rows, side by side."""
    parts = list(_parts(total))
    found = [(part, product) for part in parts if (product := _narrow_product(part)) is not None]
    if len(found) < 2 or not all(_alike(product, found[0][1]) for _, product in found):
        return
    narrow = [part for part, _ in found]
    with graph.inserting_before(total):
        left, right = (_call(graph, _CAT, [product.args[side] for _, product in found], 1 - side) for side in (0, 1))
        result = _call(graph, _MM, left, right)
        if narrow[0].target in _RESHAPES:
            result = _call(graph, _RESHAPE, result, narrow[0].args[1])
        for part in parts:
            if part not in narrow:
                result = _call(graph, _ADD, part, result)
        total.replace_all_uses_with(result)


def _is_sum(node: fx.Node) -> bool:
    """Whether it adds two tensors of its own shape and type, and nothing else."""
    if node.op != "call_function" or node.target is not _ADD or node.kwargs or len(node.args) != 2:
        return False
    return all(isinstance(own, fx.Node) and _alike(own, node) for own in node.args)


def _is_part(node: fx.Node, total: fx.Node) -> bool:
    """Whether a sum is there for another alone."""
    return _is_sum(node) and _is_sum(total) and list(node.users) == [total]


def _parts(total: fx.Node) -> Iterator[fx.Node]:
    for own in total.args:
        assert isinstance(own, fx.Node)
        if _is_part(own, total):
            yield from _parts(own)
        else:
            yield own


def _narrow_product(part: fx.Node) -> fx.Node | None:
    """The product of narrow matrices that a part of a sum is, and that nothing else uses."""
    product = part.args[0] if part.target in _RESHAPES else part
    if not isinstance(product, fx.Node) or product.target is not _MM or len(part.users) > 1 or len(product.users) > 1:
        return None
    return product if _is_narrow(product.args[0], 1) else None


def _transposed(node: Any) -> tuple[fx.Node, bool]:
    """What a matrix is the transpose of, and True; else itself."""
    return (node.args[0], True) if node.target is _PERMUTE else (node, False)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values = tree_map(lambda own: own.meta["val"] if isinstance(own, fx.Node) else own, args)
    node.meta["val"] = target(*values)
    return node


def _is_narrow(node: Any, dim: int) -> bool:
    size = _shape(node)[dim]
    return isinstance(size, int) and size <= _NARROW


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether they are known to have the same type and shape."""
    one, two = node.meta.get("val"), other.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor) or one.dtype != two.dtype:
        return False
    sizes = zip(one.shape, two.shape, strict=False)
    return one.dim() == two.dim() and all(statically_known_true(own == size) for own, size in sizes)
