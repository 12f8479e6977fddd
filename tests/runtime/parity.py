"""Training under a plan on real ranks, and how it compares with the single process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from oracle import Case, Record, batches, first_weights, single_process
from ranks import ranks
from torch import Tensor

import galvatron
from galvatron.core.spec import Cluster, ModelSpec, schedule_named
from galvatron.families import load_cluster, load_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.runtime.model import ParallelModel

__all__ = [
    "Held",
    "Trained",
    "build",
    "check",
    "cluster_of",
    "difference",
    "held",
    "plan_for",
    "run",
    "spec_of",
    "train",
]


def spec_of(case: Case) -> ModelSpec:
    """What the planner knows of the model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        return load_model(Path(folder), replace(case.training, sequence_length=case.length))


def cluster_of(devices: int) -> Cluster:
    """A flat cluster with more memory than any test needs."""
    base = load_cluster("titan-rtx-8")
    return replace(base, name="test", levels=(replace(base.levels[0], units=devices),) if devices > 1 else ())


def plan_for(case: Case) -> galvatron.Plan:
    """The case's plan, as a file would give it."""
    request = Request(
        model=spec_of(case), cluster=cluster_of(case.devices), batch=case.batch, schedule=schedule_named(case.schedule)
    )
    return priced(request, case.stages, micro_batches=case.micro_batches)


_FP64, _FP64_STEPS = {"rtol": 1e-8, "atol": 1e-12}, {"rtol": 1e-8, "atol": 1e-9}
_FP32_INSIDE, _FP32_INSIDE_STEPS = {"rtol": 1e-6, "atol": 1e-7}, {"rtol": 1e-6, "atol": 1e-7}
_FP32, _FP32_STEPS = {"rtol": 1e-4, "atol": 1e-6}, {"rtol": 1e-4, "atol": 1e-5}
"""Gradients here are up to 1, learning rates 1e-3: rounding, summed in another order, and what Adam makes of it."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of one parameter."""

    name: str
    places: Tensor
    """Positions in the flattened whole."""
    gradient: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Trained:
    """What one rank has after training."""

    losses: list[float]
    norms: list[float]
    held: list[Held]
    """Gradients of the first step, values after the last."""


# On a rank


def build(case: Case, plan: galvatron.Plan, folder: Path | None) -> ParallelModel:
    return galvatron.parallelize(None, plan, weights=folder, dtype=case.dtype, device="cpu")


def train(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> Trained:
    """Train under the plan from the folder's weights."""
    return run(case, build(case, plan, folder), given)


def run(case: Case, model: ParallelModel, given: Sequence[dict[str, Tensor]]) -> Trained:
    """Train a model as it is."""
    optimizer = model.optimizer(lr=case.learning_rate, **case.optimizer_options)
    losses, norms, gradients = [], [], []
    for step, batch in enumerate(given):
        losses.append(float(model.forward_backward(batch)))
        if step == 0:
            gradients = [own.gradient.clone() for own in held(model)]
        if case.clip is not None:
            norms.append(float(model.clip_gradients(case.clip)))
        optimizer.step()
        optimizer.zero_grad()
    final = held(model)
    return Trained(losses, norms, [replace(own, gradient=g) for own, g in zip(final, gradients, strict=True)])


def held(model: ParallelModel) -> list[Held]:
    """All that a rank holds, gradients as they are now."""
    found = []
    for local in model.locals:
        size = torch.Size(local.shard.shape)
        places = local.shard.take(torch.arange(size.numel()).view(size)).flatten()
        gradient = torch.zeros_like(local.master) if local.master.grad is None else local.master.grad
        found.append(Held(local.name, places, gradient.detach().flatten(), local.master.detach().flatten()))
    return found


# In the parent


def check(case: Case) -> None:
    """The plan trains as the single process does: on every rank, every element it holds."""
    found = ranks(case.devices).run(train, case, plan_for(case), first_weights(case), batches(case))
    different = difference(case, found, single_process(case))
    assert different is None, f"{case.stages}: {different}"


def difference(case: Case, found: Sequence[Trained], expected: Record) -> str | None:
    """What differs from the single process, if anything does; replicas are all looked at, and together the ranks must
    hold everything."""
    gradient, parameter = (_FP64, _FP64_STEPS) if case.dtype == torch.float64 else (_FP32, _FP32_STEPS)
    if case.dtype == torch.float64 and case.fp32_inside:
        gradient, parameter = _FP32_INSIDE, _FP32_INSIDE_STEPS
    missing = {name: torch.ones(whole.numel(), dtype=torch.bool) for name, whole in expected.parameters.items()}
    for rank, mine in enumerate(found):
        for what, ours, theirs in (("losses", mine.losses, expected.losses), ("norms", mine.norms, expected.norms)):
            if not _close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-7):
                return f"rank {rank}: {what} {ours}, expected {theirs}"
        for own in mine.held:
            if own.name not in missing:
                return f"rank {rank}: {own.name} is no parameter of the stock model"
            missing[own.name][own.places] = False
            for what, part, whole, tolerance in (
                ("gradient", own.gradient, expected.gradients, gradient),
                ("value", own.value, expected.parameters, parameter),
            ):
                wanted = whole[own.name].flatten()[own.places]
                if not _close(part, wanted, **tolerance):
                    off = (part - wanted).abs().max()
                    return f"rank {rank}: {what} of {own.name} off by up to {off:.1e} of {wanted.abs().max():.1e}"
    lost = [name for name, places in missing.items() if places.any()]
    return f"no rank holds all of {lost}" if lost else None


def _close(ours: Tensor, theirs: Tensor, *, rtol: float, atol: float) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=rtol, atol=atol)
