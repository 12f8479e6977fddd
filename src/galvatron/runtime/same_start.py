"""Ranks that are given a model in memory start from the weights of rank 0, as under PyTorch's own DDP.

Each rank builds the model itself, and with seeds of its own it would have other values. Ranks exchange a few numbers of
each tensor, and the values only of what differs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron.core.errors import Unequal
from galvatron.runtime import collectives
from galvatron.runtime.replicas import named_ranks

__all__ = ["start_alike"]

_LOG = logging.getLogger(__name__)
_SHOWN = 3


@dataclass(frozen=True)
class _Outline:
    """What ranks must have in common of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


@torch.no_grad()
def start_alike(model: nn.Module | None, device: torch.device, *, seeded: bool) -> None:
    """Give the model of every rank the values of rank 0's. Call it on all ranks.

    ``model``: this rank's, with weights; None: it starts from none. ``seeded``: then from a seed, not from a file.
    """
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    tensors = {} if model is None else _tensors(model)
    outlines = {name: _Outline(tuple(own.shape), own.dtype, own.requires_grad) for name, own in tensors.items()}
    figures = {name: _figures(own) for name, own in tensors.items()}
    given = collectives.all_gather_object((None if model is None else outlines, figures, seeded), device)
    holding = [rank for rank, (known, _, _) in enumerate(given) if known is not None]
    if not holding:
        return
    without = [rank for rank, (known, _, from_seed) in enumerate(given) if known is None and from_seed]
    if without:
        raise Unequal(
            f"weights: {named_ranks(holding)} start from a model in memory, {named_ranks(without)} from a seed; give "
            "all ranks the model with its weights, or none"
        )
    if len(holding) < len(given):
        return  # the others read a folder of weights: whoever says both knows why
    _check_outlines([known for known, _, _ in given])
    different = [name for name in given[0][1] if any(known[name] != given[0][1][name] for _, known, _ in given)]
    if not different:
        return
    others = [rank for rank, (_, known, _) in enumerate(given) if any(known[n] != given[0][1][n] for n in different)]
    if dist.get_rank() == 0:
        shown = ", ".join(different[:_SHOWN]) + (" …" if len(different) > _SHOWN else "")
        _LOG.warning(
            "weights: %s built the model with other values than rank 0 (%s); those of rank 0 are used",
            named_ranks(others),
            shown,
        )
    for name in different:
        own = _real(tensors[name])
        sent = own.detach().to(device).contiguous()
        dist.broadcast(sent, src=0)
        own.copy_(sent)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    buffers = {name: own for name, own in model.named_buffers() if not own.is_meta}
    return {**dict(model.named_parameters()), **buffers}


def _real(own: Tensor) -> Tensor:
    """Complex numbers (of rotary positions, say) as pairs of real ones, sharing their memory."""
    return torch.view_as_real(own) if own.is_complex() else own


def _figures(own: Tensor) -> tuple[int, float]:
    """Equal for equal bits, and hardly for others; the first element because in a hash by XOR equal ones vanish."""
    if not own.numel():
        return 0, 0.0
    flat = _real(own.detach()).flatten().cpu()
    return int(torch.hash_tensor(flat).view(torch.int64)), float(flat[0])


def _check_outlines(given: list[dict[str, _Outline]]) -> None:
    """Values can be sent where shapes are equal; what differs otherwise is another model."""
    for rank, known in enumerate(given):
        for name in sorted(given[0].keys() | known.keys()):
            first, own = given[0].get(name), known.get(name)
            if first != own:
                raise Unequal(
                    f"weights: ranks were given different models: {name} is {_words(first)} on rank 0, {_words(own)} "
                    f"on rank {rank}; build the same model on all ranks"
                )


def _words(outline: _Outline | None) -> str:
    if outline is None:
        return "missing"
    kind = str(outline.dtype).removeprefix("torch.")
    return f"{list(outline.shape)} in {kind}, {'trained' if outline.trained else 'frozen'}"
