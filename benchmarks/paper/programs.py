"""From a system to one rank's iteration: the stock program where there is one, else our runtime under the plan."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.families.build import build_meta
from galvatron.families.registry import layered_model
from galvatron.measure.rehearsal.weights import CheapWeights
from galvatron.planner.plan.plan import Plan
from galvatron.runtime.parallelize import parallelize
from stock_data import ddp, fsdp2
from stock_pipeline import gpipe
from stock_tensor import dtensor

__all__ = ["Step", "build"]

Step = Callable[[], Tensor | None]
"""One training iteration; the loss, where this rank has it."""

STOCK: dict[str, Callable[[Plan, torch.device], Step]] = {"dp": ddp, "sdp": fsdp2, "tp": dtensor, "pp": gpipe}


def build(system: str, program: str, plan: Plan, device: torch.device) -> Step:
    """One rank's share of a system, ready to run."""
    if program == "galvatron":
        return _ours(plan, device)
    if system not in STOCK:
        raise InvalidInput(f"system {system!r}: no stock program; expected one of {', '.join(STOCK)}")
    return STOCK[system](plan, device)


def _ours(plan: Plan, device: torch.device) -> Step:
    assert plan.model.config is not None
    layered = layered_model(build_meta(plan.model.config, plan.model.training))
    model = parallelize(None, plan, weights=CheapWeights(layered), device=device)
    optimizer = model.optimizer()
    batch = layered.example(plan.batch, plan.model.training.sequence_length, torch.Generator().manual_seed(0))
    local = next(model.local_batches([batch]))

    def step() -> Tensor:
        loss = model.forward_backward(local)
        optimizer.step()
        optimizer.zero_grad()
        return loss.tensor()

    return step
