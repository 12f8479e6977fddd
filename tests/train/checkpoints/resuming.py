"""On ranks: training that saves and goes on elsewhere, and whole states put together without checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle import Case
from parity import build
from torch import Tensor
from torch.optim import Optimizer

import galvatron
from galvatron.runtime.model import ParallelModel
from galvatron.runtime.whole import whole
from galvatron.train.checkpoints.checkpoints import Checkpoints

__all__ = ["State", "loaded", "made", "optimizer_for", "saved", "state_of"]


@dataclass(frozen=True)
class State:
    """The whole state of training, and what it does next."""

    tensors: dict[str, Tensor]
    """Parameters by their names, states of the optimizer by name and entry."""
    scalars: dict[str, float]
    """Of this rank."""
    next_loss: float
    progress: dict[str, Any]


def made(case: Case, plan: galvatron.Plan, weights: Path | None) -> tuple[ParallelModel, Optimizer]:
    model = build(case, plan, weights)
    return model, optimizer_for(case, model)


def optimizer_for(case: Case, model: ParallelModel) -> Optimizer:
    """Two groups, as usual: no weight decay for vectors. By name, since a part of a vector may look like any other."""
    whole_dims = {name: len(shape) for name, shape in model.shapes.items()}
    groups = [
        {"params": [own for name, own in model.named_parameters() if (whole_dims[name] > 1) is matrix]}
        for matrix in (True, False)
    ]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    return torch.optim.AdamW(groups, lr=case.learning_rate, eps=case.epsilon, weight_decay=0.1)


def step(model: ParallelModel, optimizer: Optimizer, batch: dict[str, Tensor]) -> float:
    loss = float(model.forward_backward(batch))
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state_of(model: ParallelModel, optimizer: Optimizer, batch: dict[str, Tensor], progress: dict[str, Any]) -> State:
    """Gathered by collectives of the runtime, which know nothing of checkpoints."""
    tensors = {name: own.clone() for name, own in model.whole_parameters()}
    for entry in ("exp_avg", "exp_avg_sq"):
        found = whole(
            model.locals,
            model.shapes,
            lambda local, entry=entry: optimizer.state[local.master].get(entry),  # type: ignore[misc]
            model.device,
            model._dtype,
        )
        tensors |= {f"{name} {entry}": own.clone() for name, own in found}
    scalars = {
        local.name: float(optimizer.state[local.master]["step"])
        for local in model.locals
        if "step" in optimizer.state[local.master]
    }
    return State(tensors, scalars, step(model, optimizer, batch), progress)


def saved(case: Case, plan: galvatron.Plan, weights: Path, given: Sequence[dict[str, Tensor]], folder: Path) -> State:
    """Train on all batches but the last, save, and see what comes next while the save is under way."""
    model, optimizer = made(case, plan, weights)
    for batch in given[:-1]:
        step(model, optimizer, batch)
    checkpoints = Checkpoints(folder)
    progress = {"sample": 48, "order": [3, 1, 2], "epoch": 0.5}
    checkpoints.save(model, optimizer, progress, step=len(given) - 1)
    state = state_of(model, optimizer, given[-1], progress)
    checkpoints.finish()
    return state


def loaded(case: Case, plan: galvatron.Plan, given: Sequence[dict[str, Tensor]], folder: Path) -> State:
    """From other weights, under another plan: what the checkpoint gives, and what comes next."""
    model, optimizer = made(case, plan, None)
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = 1.0, (0.5, 0.5)
    found = Checkpoints(folder).load(model, optimizer)
    assert found.step == len(given) - 1
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["lr"] == case.learning_rate
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    return state_of(model, optimizer, given[-1], dict(found.progress))
