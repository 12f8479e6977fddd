"""What a training loop may do between steps: accumulate over calls, evaluate, zero in place, choose its optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from longer import longer
from loops import accumulate, accumulated_difference, evaluating
from oracle import Case, batches, first_weights, single_process, stock_model
from parity import Trained, build, check, difference, held, plan_for
from ranks import ranks
from small_models import config
from torch import Tensor
from torch.nn import functional

import galvatron
from galvatron.families.layer import IGNORED

_MIXES = {
    "mixed": [["tp4", "dp4", "sdp2-tp2", "dp4+zero2"]],
    "sharded": [["sdp4", "dp2-sdp2", "sdp4+rc", "sdp4"]],
    "sequence": [["dp2-tp2", "tp4+sp", "sdp2-tp2+sp", "tp2-dp2+sp"]],
    "pipeline": [["dp2", "sdp2"], ["tp2+sp", "dp2"]],
}


def _case(mix: str) -> Case:
    return Case(config=config("gpt2"), stages=_MIXES[mix], micro_batches=2, padding=True, steps=2)


@pytest.mark.parametrize("mix", [longer(own) if own in ("sharded", "sequence") else own for own in _MIXES])
def test_gradients_add_up_over_calls(mix: str) -> None:
    """Two calls without ``zero_grad`` give the sum of the two batches' gradients, as in PyTorch."""
    case = _case(mix)
    found = ranks(4).run(accumulate, case, plan_for(case), first_weights(case), batches(case))
    assert accumulated_difference(case, found) is None


@pytest.mark.parametrize("mix", [longer("mixed"), "sharded", "pipeline"])
def test_evaluating_changes_nothing(mix: str) -> None:
    """``evaluate`` before and after backward gives the loss of the weights at hand, and training goes on as before."""
    case = _case(mix)
    found = ranks(4).run(evaluating, case, plan_for(case), first_weights(case), batches(case))
    assert difference(case, found, single_process(case)) is None


def _without_targets(
    case: Case, plan: galvatron.Plan, folder: Path, batch: dict[str, Tensor], smoothing: float
) -> tuple[float, dict[str, Tensor]]:
    """On a rank: the loss and the gradients of a batch of which nothing counts."""
    model = galvatron.parallelize(
        None, plan, weights=folder, dtype=case.dtype, device="cpu", label_smoothing=smoothing, check=False
    )
    loss = float(model.forward_backward({**batch, "labels": torch.full_like(batch["labels"], IGNORED)}))
    return loss, dict(model.whole_gradients())


@pytest.mark.parametrize(
    ("head", "smoothing"),
    [("dp2", 0.1), ("tp2+fl", 0.0), longer("dp2", 0.0), longer("dp2+fl", 0.0), longer("tp2", 0.0), longer("tp2", 0.1)],
)
def test_a_batch_without_targets_leaves_weights_alone(head: str, smoothing: float) -> None:
    """As in one process, where its loss is no number and gradients are zero, however the loss is computed."""
    case = Case(config=config("gpt2"), stages=[["dp2", "tp2", "sdp2", head]], batch=4, steps=1)
    (batch,) = batches(case)
    model = stock_model(case)
    labels = torch.full_like(batch["labels"], IGNORED)
    logits = model(**{**batch, "labels": labels}).logits[:, :-1]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=smoothing)
    torch.autograd.backward(loss)
    assert bool(loss.isnan())
    assert all(own.grad is not None and not own.grad.any() for own in model.parameters())
    folder = first_weights(case)
    for found, gradients in ranks(2).run(_without_targets, case, plan_for(case), folder, batch, smoothing):
        assert math.isnan(found)
        assert not any(own.isnan().any() or own.any() for own in gradients.values())


def _zeroing(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> Trained:
    """On a rank: gradients are set to zero rather than dropped, and batches cut beforehand."""
    model = build(case, plan, folder)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=case.learning_rate, eps=case.epsilon, foreach=False)
    losses = []
    for batch in model.local_batches(given):
        optimizer.zero_grad(set_to_none=False)
        losses.append(float(model.forward_backward(batch)))
        optimizer.step()
    return Trained(losses, [], held(model))


@pytest.mark.parametrize("mix", [longer("mixed"), "pipeline"])
def test_gradients_set_to_zero(mix: str) -> None:
    """With a loop over single tensors in the optimizer; compared are losses and weights, not the last gradients."""
    case = _case(mix)
    found = ranks(4).run(_zeroing, case, plan_for(case), first_weights(case), batches(case))
    expected = single_process(case)
    for mine in found:
        assert mine.losses == pytest.approx(expected.losses, rel=1e-6)
        for own in mine.held:
            whole = expected.parameters[own.name].flatten()
            torch.testing.assert_close(own.value, whole[own.places], rtol=1e-8, atol=1e-9)


def test_one_process() -> None:
    """No communication at all."""
    check(Case(config=config("bert"), stages=[["single", "single+rc", "single", "single"]], micro_batches=4, clip=0.5))
