"""Ranks that hold the same part of a parameter must hold the same numbers: a fault of a device would else train on
without a word.

Each part is told by two numbers in fp64: its norm, and the sum of its elements with fixed signs, which changes by about
the norm of any difference. Ranks exchange these alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron.core.errors import Unequal
from galvatron.runtime import collectives
from galvatron.runtime.data_parallel.units import LocalParameter

__all__ = ["compare_replicas", "named_ranks"]

_TOLERANCE = 1e-3
"""Of the norm. Ranks of TP compute a gradient that they share each for itself, so replicas may drift by rounding."""
_CHUNK = 1 << 20
"""Elements at a time, so that fp64 copies take little memory."""


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
        f"replicas: {named_ranks(holders)} hold the same part of {name}{more}, but {named_ranks(ranks)} no longer "
        f"{'has' if len(ranks) == 1 else 'have'} the values of the others; the weights are wrong since some step after "
        "the last comparison: go on from a checkpoint before that, and if the same rank differs again, replace its "
        "device"
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
        sums.append(torch.dot(chunk.double(), signs[start : start + len(chunk)].double()))
        norms.append(torch.linalg.vector_norm(chunk, dtype=torch.float64))
    return torch.stack([torch.stack(sums).sum(), torch.linalg.vector_norm(torch.stack(norms))])


@lru_cache(maxsize=1)
def _signs(device: torch.device) -> Tensor:
    """+1 and -1, by the place alone and in whole numbers, so that all kinds of devices agree on them."""
    places = torch.arange(2 * _CHUNK, device=device)
    mixed = places * 2654435761 % (1 << 32)
    mixed = (mixed ^ (mixed >> 15)) * 1597334677 % (1 << 32)
    return (1 - 2 * ((mixed >> 13) & 1)).to(torch.int8)  # small, because it is kept


def _stack(figures: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(figures) if figures else torch.zeros((0, 2), dtype=torch.float64, device=device)


def named_ranks(ranks: Sequence[int]) -> str:
    """For errors."""
    shown = ", ".join(map(str, ranks[:8])) + (f" … ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
