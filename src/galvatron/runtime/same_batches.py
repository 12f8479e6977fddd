"""All ranks are given the same batches, of which each takes its part: batches that differ are noticed, not trained on.

Each sample of each input is told by two numbers. Ranks compare those of the samples that they read; of the labels all,
because every rank counts the targets of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron.core.errors import Unequal
from galvatron.families.layer import Batch
from galvatron.runtime import collectives
from galvatron.runtime.replicas import named_ranks

__all__ = ["BatchFigures", "Marks", "compare_batches", "compared_here", "figures_of", "mark_of"]

_MARKS = 65521
"""How many: the square of a thousand ranks' sum is still a whole number in fp64."""
_MIXING = ((0x9E3779B97F4A7C15 - 2**64, 30), (0xBF58476D1CE4E5B9 - 2**64, 27), (0x94D049BB133111EB - 2**64, 31))
_TOLERANCE = 1e-3
"""Of the norm of a sample in floating point: kernels of different devices may round differently."""


@dataclass(frozen=True)
class BatchFigures:
    """A batch as a rank saw it."""

    rows: Mapping[str, Tensor]
    """For each input two numbers a sample; NaN for those that this rank does not read."""
    facts: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and type of each input."""


def figures_of(batch: Batch, read: Mapping[str, frozenset[int]]) -> BatchFigures:
    """``read``: the rows that are read, of inputs of which others may hold anything."""
    rows = {}
    for name, tensor in batch.items():
        wanted = sorted(read.get(name, range(len(tensor))))
        rows[name] = torch.full((len(tensor), 2), torch.nan, dtype=torch.float64)
        for row in wanted:
            flat = tensor[row].detach().flatten().double()
            places = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
            # Whole numbers by their place: exact up to 2**53, and another order has another sum.
            sums = torch.stack([torch.dot(flat, places % 1021), torch.linalg.vector_norm(flat)])
            rows[name][row] = sums.cpu()
    return BatchFigures(rows, {name: (tuple(own.shape), str(own.dtype)) for name, own in batch.items()})


def compare_batches(figures: BatchFigures, device: torch.device) -> None:
    """Raise :class:`Unequal` on all ranks if some were given other batches. Call it on all of them."""
    given: list[BatchFigures] = collectives.all_gather_object(figures, device)
    first = given[0]
    other = [rank for rank, own in enumerate(given) if own.facts != first.facts]
    if other:
        rank = other[0]
        names = sorted(first.facts.keys() | given[rank].facts.keys())
        name = next(each for each in names if first.facts.get(each) != given[rank].facts.get(each))
        raise Unequal(
            f"batch: {name!r} is {_words(first.facts.get(name))} on rank 0, {_words(given[rank].facts.get(name))} on "
            f"{named_ranks(other)}; {_ADVICE}"
        )
    for name, (_, dtype) in first.facts.items():
        rows, ranks = _different(torch.stack([own.rows[name] for own in given]), exact="float" not in dtype)
        if rows:
            shown = ", ".join(map(str, rows[:4])) + (f" … ({len(rows)} in all)" if len(rows) > 4 else "")
            raise Unequal(
                f"batch: ranks were given different batches: sample{'s' * (len(rows) > 1)} {shown} of {name!r} on "
                f"{named_ranks(ranks)} differ from those of the ranks before; {_ADVICE}"
            )


_ADVICE = (
    "give every rank the same whole batch, of which it takes its part itself: seed the data loader alike on all ranks, "
    "and use no DistributedSampler"
)


def mark_of(batch: Batch) -> Tensor:
    """A number for the labels, which every rank has whole; it costs so little that ranks compare it with each loss. Of
    whole numbers it is a whole number, which one in 65,521 other batches has, too; of others it is in fp64."""
    labels = batch.get("labels")
    if labels is None:
        return torch.zeros((), dtype=torch.long)
    flat = labels.detach().flatten()
    weights = _weights(flat.numel(), flat.device)
    if not flat.is_floating_point():
        return (flat.long() * weights).sum() % _MARKS
    flat = flat.double()
    norm: Tensor = torch.linalg.vector_norm(flat).clamp(min=torch.finfo(torch.float64).tiny)
    drawn = weights.double() * (2 * math.sqrt(3) / _MARKS) - math.sqrt(3)
    # The first term is as if of a normal distribution, whatever the labels are like.
    return (flat / norm * drawn).sum() + norm.log()


def _weights(count: int, device: torch.device) -> Tensor:
    """The same on all ranks, and as if drawn: the mixing of splitmix64, whose products wrap around."""
    mixed = torch.arange(1, count + 1, device=device)
    for factor, shift in _MIXING:
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> shift)
    return mixed % _MARKS


@dataclass(frozen=True)
class Marks:
    """What the sums of all ranks' marks, and of their squares, say: whether all ranks have the same."""

    ranks: int
    exact: bool
    """Whole numbers; others may have been rounded differently."""

    def differ(self, total: Tensor, squares: Tensor) -> Tensor:
        """Whether some do, on the device of the sums. What is no number is equal to all."""
        return squares * self.ranks - total * total > (0.0 if self.exact else (self.ranks * _TOLERANCE) ** 2)

    def check(self, total: Tensor, squares: Tensor) -> None:
        """Raise :class:`Unequal` if some do."""
        if bool(self.differ(total, squares)):
            raise Unequal(f"batch: ranks were given batches with different labels in this iteration; {_ADVICE}")


def _different(figures: Tensor, *, exact: bool) -> tuple[list[int], list[int]]:
    """Samples of which ranks that read them do not agree, and the ranks that differ from the first of these."""
    known = figures.isfinite().all(-1)
    first = known.int().argmax(0)  # of each sample, the first rank that reads it
    reference = figures[first, torch.arange(figures.shape[1])]
    allowed = torch.zeros(figures.shape[1], dtype=torch.float64) if exact else _TOLERANCE * reference[:, 1].nan_to_num()
    weights = torch.tensor([1.0, 1.0] if exact else [1 / 1021, 1.0], dtype=torch.float64)
    gaps = ((figures - reference).abs() * weights).amax(-1)
    wrong = known & (gaps > allowed)
    return wrong.any(0).nonzero().flatten().tolist(), wrong.any(1).nonzero().flatten().tolist()


def _words(facts: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if facts is None else f"{list(facts[0])} in {facts[1].removeprefix('torch.')}"


def compared_here() -> bool:
    """Whether there are other ranks at all."""
    return dist.get_world_size() > 1 and dist.get_backend() != "fake"
