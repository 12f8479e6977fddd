"""Watches, on CPU ranks, which results of FSDP2's reduce-scatters become gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from oracle import Case
from parity import build
from torch import Tensor

import galvatron
from galvatron.runtime.data_parallel.fsdp_memory import FsdpReduceScatter
from galvatron.runtime.data_parallel.sharded import ShardedUnit

__all__ = ["reduce"]


class _Watched(FsdpReduceScatter):
    """Where there are no streams: FSDP2 asks for an input's memory, then for its output's."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.stays: list[bool] = []

    def expect(self, *, stays: bool) -> None:
        self.stays.append(stays)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.given.append(torch.empty(*size, dtype=dtype, device=device))
        return self.given[-1]


def reduce(
    case: Case, plan: galvatron.Plan, folder: Path, batch: dict[str, Tensor]
) -> list[tuple[list[bool], list[bool]]]:
    """On a rank, of each sharded layer: what was expected of each micro-batch's result, and whether it is the memory of
    the gradients in the end."""
    model = build(case, plan, folder)
    watched: list[tuple[ShardedUnit, _Watched]] = []
    for unit in model._units:
        assert isinstance(unit, ShardedUnit)
        watched.append((unit, _Watched()))
        unit._reduction = watched[-1][1]
        unit.fsdp.set_custom_reduce_scatter(cast(Any, unit._reduction))
    model.forward_backward(batch)
    found = []
    for unit, seen in watched:
        kept = {
            local.master.grad.untyped_storage().data_ptr() for local in unit.locals if local.master.grad is not None
        }
        outputs = [tensor.untyped_storage().data_ptr() for tensor in seen.given[1::2]]
        found.append((seen.stays, [output in kept for output in outputs]))
    return found
