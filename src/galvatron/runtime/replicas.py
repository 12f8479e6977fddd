"""Ranks that hold the same part of a parameter must hold the same numbers: a fault of a device, or ranks that started
from different weights, would else train on without a word.

Each part is told by two numbers in fp64: its norm, and the sum of its elements with fixed signs, which changes by about
the norm of any difference. Ranks exchange these alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron.core.errors import Unequal
from galvatron.families.weights import InitialWeights, ModelWeights, Weights
from galvatron.runtime import collectives
from galvatron.runtime.data_parallel.units import LocalParameter

__all__ = ["check_sources", "compare_replicas"]

_TOLERANCE = 1e-3
"""Of the norm. Ranks of TP compute a gradient that they share each for itself, so replicas may drift by rounding."""
_CHUNK = 1 << 20
"""Elements at a time, so that fp64 copies take little memory."""
_SAMPLE = 1 << 12
"""Elements of each parameter of a model in memory by which it is known."""


@torch.no_grad()
def compare_replicas(locals_: Sequence[LocalParameter], device: torch.device) -> None:
    """Raise :class:`Unequal` on all ranks if holders of the same part of a parameter do not agree. Call it on all."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        return
    signs = _signs(device)
    mine = _stack([_figures(local.name, local.master, signs) for local in locals_], device)
    # All ranks of a stage have the same parameters in the same order, and holders are of one stage.
    rows = torch.tensor(len(locals_), device=device)
    dist.all_reduce(rows, dist.ReduceOp.MAX)
    padded = mine.new_zeros(int(rows), 2)
    padded[: len(mine)] = mine
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded)
    figures = torch.stack(gathered).cpu()
    found = []
    for place, local in enumerate(locals_):
        if local.holders[0] != rank or len(local.holders) == 1:
            continue  # one of them speaks for all
        different = _different(figures[list(local.holders), place])
        if different:
            found.append((local.name, local.holders, [local.holders[index] for index in different]))
    any_found = torch.tensor(len(found), device=device)
    dist.all_reduce(any_found, dist.ReduceOp.MAX)
    if int(any_found):
        _raise(found, device)


def _raise(found: list[tuple[str, tuple[int, ...], list[int]]], device: torch.device) -> None:
    differences = [each for part in collectives.all_gather_object(found, device) for each in part]
    name, holders, ranks = differences[0]
    names = {name for name, _, _ in differences}
    more = f" (and {len(names) - 1} other parameters)" if len(names) > 1 else ""
    raise Unequal(
        f"replicas: {_ranks(holders)} hold the same part of {name}{more}, but {_ranks(ranks)} no longer "
        f"{'has' if len(ranks) == 1 else 'have'} the values of the others; the weights are wrong since some step after "
        "the last comparison: go on from a checkpoint before that, and if the same rank differs again, replace its "
        "device"
    )


@torch.no_grad()
def check_sources(source: Weights, device: torch.device) -> None:
    """Ranks that start from models in memory must start from the same one. Call it on all ranks, whatever theirs is."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    mine: dict[str, tuple[float, float]] | None = None
    if isinstance(source, ModelWeights):
        signs = _signs(torch.device("cpu"))
        mine = {}
        for name, own in source.parameters():
            total, norm = _figures(name, own.flatten()[:_SAMPLE].cpu(), signs).tolist()
            mine[name] = total, norm
    given = collectives.all_gather_object((mine, isinstance(source, InitialWeights)), device)
    holding = [rank for rank, (figures, _) in enumerate(given) if figures is not None]
    seeded = [rank for rank, (_, initial) in enumerate(given) if initial]
    if holding and seeded:
        raise Unequal(
            f"weights: {_ranks(holding)} start from a model in memory, {_ranks(seeded)} from a seed; give all ranks "
            "the model with its weights, or none"
        )
    if not holding:
        return
    for name in given[holding[0]][0]:
        figures = torch.tensor([given[rank][0].get(name, (torch.nan, torch.nan)) for rank in holding])
        different = [holding[index] for index in _different(figures)]
        if different:
            raise Unequal(
                f"weights: the models in memory that ranks start from are not the same: {name} on {_ranks(different)} "
                "has other values than on the others; seed all ranks alike (torch.manual_seed before the model is "
                "built) or load the same weights on all"
            )


def _different(figures: Tensor) -> list[int]:
    """Which of several replicas, a row each, are unlike most of them."""
    lost = ~figures.isfinite().all(-1)
    allowed = _TOLERANCE * figures[:, 1].where(~lost, 0.0).max()
    gaps = (figures[:, None] - figures[None]).abs().amax(-1)
    alike = (gaps <= allowed) | (lost[:, None] & lost[None])
    most = int(alike.sum(1).argmax())
    return (~alike[most]).nonzero().flatten().tolist()


def _figures(name: str, values: Tensor, signs: Tensor) -> Tensor:
    """The sum with signs and the norm of a parameter."""
    flat = values.detach().flatten()
    first = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) % _CHUNK
    sums, norms = [], []
    for number, chunk in enumerate(flat.split(_CHUNK)):
        start = (first + 7919 * number) % _CHUNK
        sums.append(torch.dot(chunk.double(), signs[start : start + len(chunk)]))
        norms.append(torch.linalg.vector_norm(chunk, dtype=torch.float64))
    return torch.stack([torch.stack(sums).sum(), torch.linalg.vector_norm(torch.stack(norms))])


def _signs(device: torch.device) -> Tensor:
    """+1 and -1, by the place alone and in whole numbers, so that all kinds of devices agree on them."""
    places = torch.arange(2 * _CHUNK, device=device)
    mixed = places * 2654435761 % (1 << 32)
    mixed = (mixed ^ (mixed >> 15)) * 1597334677 % (1 << 32)
    return (1 - 2 * ((mixed >> 13) & 1)).double()


def _stack(figures: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(figures) if figures else torch.zeros((0, 2), dtype=torch.float64, device=device)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" … ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
