"""What a training loop may do between steps: accumulate over calls, evaluate, zero in place, clip, read the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import EPSILON, Case, batches, first_weights, single_process, stock_loss, stock_model
from parity import Held, Trained, build, check, difference, held, plan_for
from ranks import ranks
from small_models import config
from torch import Tensor

import galvatron

_MIXES = {
    "mixed": [["tp4", "dp4", "sdp2-tp2", "dp4+zero2"]],
    "sharded": [["sdp4", "dp2-sdp2", "sdp4+rc", "sdp4"]],
    "sequence": [["dp2-tp2", "tp4+sp", "sdp2-tp2+sp", "tp2-dp2+sp"]],
    "pipeline": [["dp2", "sdp2"], ["tp2+sp", "dp2"]],
}


def _case(mix: str, **changes: object) -> Case:
    settings = {"config": config("gpt2"), "stages": _MIXES[mix], "micro_batches": 2, "padding": True, **changes}
    return Case(**settings)  # type: ignore[arg-type]


# Gradients add up until they are dropped


def _accumulated(case: Case, plan: galvatron.Plan, folder: Path, given: list[dict[str, Tensor]]) -> list[Held]:
    model = build(case, plan, folder)
    for batch in given:
        model.forward_backward(batch)
    return held(model)


@pytest.mark.parametrize("mix", _MIXES)
def test_gradients_add_up_over_calls(mix: str) -> None:
    """Three calls without ``zero_grad`` give the sum of the three batches' gradients, as in PyTorch."""
    case = _case(mix)
    given = batches(case)
    model = stock_model(case).to(case.dtype)
    for batch in given:
        stock_loss(model, batch).backward()
    expected = {name: own.grad.flatten() for name, own in model.named_parameters() if own.grad is not None}
    for rank, mine in enumerate(ranks(4).run(_accumulated, case, plan_for(case), first_weights(case), given)):
        for own in mine:
            torch.testing.assert_close(
                own.gradient, expected[own.name][own.places], rtol=1e-8, atol=1e-12,
                msg=lambda text, own=own, rank=rank: f"rank {rank}, {own.name}: {text}",
            )  # fmt: skip


# Evaluation


def _evaluating(case: Case, plan: galvatron.Plan, folder: Path, given: list[dict[str, Tensor]]) -> Trained:
    """Train, with an evaluation at every point of the loop; its losses follow those of training."""
    model = build(case, plan, folder)
    optimizer = model.optimizer(torch.optim.AdamW, lr=case.learning_rate, eps=EPSILON)
    losses, evaluations, first = [], [], []
    for step, batch in enumerate(given):
        evaluations.append(float(model.evaluate(batch)))
        losses.append(float(model.forward_backward(batch)))
        if step == 0:
            first = [own.gradient.clone() for own in held(model)]
        evaluations.append(float(model.evaluate(batch)))
        optimizer.step()
        optimizer.zero_grad()
    final = [Held(own.name, own.places, gradient, own.value) for own, gradient in zip(held(model), first, strict=True)]
    assert evaluations[::2] == pytest.approx(losses, rel=1e-6), "evaluate before a step gives the loss of that step"
    assert evaluations[1::2] == pytest.approx(losses, rel=1e-6), "gradients do not change the loss"
    return Trained(losses, [], final)


@pytest.mark.parametrize("mix", _MIXES)
def test_evaluating_changes_nothing(mix: str) -> None:
    """``evaluate`` before and after backward gives the loss of the weights at hand, and training goes on as before."""
    case = _case(mix)
    found = ranks(4).run(_evaluating, case, plan_for(case), first_weights(case), batches(case))
    assert difference(case, found, single_process(case)) is None
