"""Training loops that do more than forward, backward and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from oracle import Case, batches, stock_loss, stock_model
from parity import Held, Trained, build, held
from torch import Tensor

import galvatron

__all__ = ["accumulate", "accumulated_difference", "evaluating"]


def accumulate(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> list[Held]:
    """On a rank: several batches without dropping gradients."""
    model = build(case, plan, folder)
    for batch in given:
        model.forward_backward(batch)
    return held(model)


def accumulated_difference(case: Case, found: Sequence[Sequence[Held]]) -> str | None:
    """What differs from the gradients that a single process accumulates over the case's batches."""
    model = stock_model(case).to(case.dtype)
    for batch in batches(case):
        torch.autograd.backward(stock_loss(model, batch))
    expected = {name: own.grad.flatten() for name, own in model.named_parameters() if own.grad is not None}
    for rank, mine in enumerate(found):
        for own in mine:
            if not torch.allclose(own.gradient, expected[own.name][own.places], rtol=1e-8, atol=1e-12):
                return f"rank {rank}: gradient of {own.name}"
    return None


def evaluating(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> Trained:
    """On a rank: train, and evaluate before and after each backward; all three losses of a step are listed as one if
    they are equal."""
    model = build(case, plan, folder)
    optimizer = model.optimizer(torch.optim.AdamW, lr=case.learning_rate, eps=case.epsilon)
    losses, first = [], []
    for step, batch in enumerate(given):
        before = float(model.evaluate(batch))
        loss = float(model.forward_backward(batch))
        if step == 0:
            first = [own.gradient.clone() for own in held(model)]
        after = float(model.evaluate(batch))
        losses.append(loss if abs(before - loss) + abs(after - loss) < 1e-5 * loss else torch.nan)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, [], [replace(own, gradient=g) for own, g in zip(held(model), first, strict=True)])
