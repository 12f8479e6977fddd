"""Whole parameters, gradients or optimizer states, put together from the parts that ranks hold, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron.models.layer import CutModel
from galvatron.runtime.units import LocalParameter

__all__ = ["shapes_of", "whole"]


def shapes_of(cut: CutModel) -> dict[str, tuple[int, ...]]:
    """Every parameter of a model by its stock name, tied ones once, in the model's order."""
    owners = {use: tie.uses[0] for tie in cut.ties for use in tie.uses}
    shapes: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(cut.layers):
        tied = {use.name: owner for use, owner in owners.items() if use.layer == index}
        for name, parameter in layer.named_parameters():
            owner = tied.get(name)
            stock = layer.stock_name(name) if owner is None else cut.layers[owner.layer].stock_name(owner.name)
            shapes.setdefault(stock, tuple(parameter.shape))
    return shapes


@torch.no_grad()
def whole(
    locals_: Sequence[LocalParameter],
    shapes: Mapping[str, tuple[int, ...]],
    pick: Callable[[LocalParameter], Tensor | None],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) for each parameter, the same on every rank; ``pick``: what of it (its value, gradient …).

    All ranks must take all of them. Each piece is added by one of the ranks that hold it, so sums are exact.
    """
    held = {local.name: local for local in locals_}
    for name, shape in shapes.items():
        total = torch.zeros(shape, dtype=dtype, device=device)
        local = held.get(name)
        if local is not None and local.primary:
            part = pick(local)
            if part is not None and part.numel():
                local.piece.put(part, total)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        yield name, total
