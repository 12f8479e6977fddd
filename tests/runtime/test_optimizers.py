"""The optimizer that a plan names trains its parts as it trains the whole model in a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Case, Record, batches, first_weights, stock_loss, stock_model
from parity import check, difference, plan_for, train
from ranks import ranks
from small_models import config
from torch import Tensor, nn

from galvatron import parallelize
from galvatron.core.spec import Training
from galvatron.runtime.optimizers import AdamWBF16, skipped_unless_finite, skips_itself
from galvatron.train.checkpoints.checkpoints import Checkpoints


def test_sgd_with_momentum_under_sdp_and_tp() -> None:
    stages = [["sdp2-tp2", "sdp4", "tp4", "dp2-tp2"]]
    training = Training(dropout=False, optimizer="sgd")
    check(Case(config=config("bert"), stages=stages, micro_batches=2, training=training, learning_rate=0.05, clip=0.5))


_BETAS, _RATE, _DECAY = (0.9, 0.999), 1e-3, 0.01


def _bf16_loop(case: Case) -> Record:
    """The stock model in one process, AdamW written out: moments are used, then rounded to bf16."""
    model = stock_model(case).to(case.dtype)
    moments = {name: [torch.zeros_like(own, dtype=torch.bfloat16) for _ in range(2)] for name, own in _named(model)}
    losses, gradients = [], {}
    for step, batch in enumerate(batches(case), start=1):
        loss = stock_loss(model, batch)
        torch.autograd.backward(loss)
        if step == 1:
            gradients = {name: _gradient(own).clone() for name, own in _named(model)}
        for name, own in _named(model):
            gradient = _gradient(own)
            first, second = (moment.to(case.dtype) for moment in moments[name])
            first = _BETAS[0] * first + (1 - _BETAS[0]) * gradient
            second = _BETAS[1] * second + (1 - _BETAS[1]) * gradient**2
            moments[name] = [first.to(torch.bfloat16), second.to(torch.bfloat16)]
            scale = (second / (1 - _BETAS[1] ** step)).sqrt() + case.epsilon
            with torch.no_grad():
                own.sub_(_RATE * _DECAY * own)
                own.sub_(_RATE * (first / (1 - _BETAS[0] ** step)) / scale)
        model.zero_grad()
        losses.append(float(loss.detach()))
    return Record(losses, [], gradients, {name: own.detach().clone() for name, own in _named(model)})


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def _gradient(own: nn.Parameter) -> Tensor:
    return torch.zeros_like(own) if own.grad is None else own.grad


def test_moments_in_bf16_as_a_loop_in_one_process() -> None:
    training = Training(dropout=False, optimizer="adamw-bf16")
    case = Case(config=config("bert"), stages=[["sdp2", "sdp2", "tp2", "dp2"]], training=training, learning_rate=_RATE)
    found = ranks(2).run(train, case, plan_for(case), first_weights(case), batches(case))
    assert difference(case, found, _bf16_loop(case)) is None


def _moments(case: Case, plan: Any, folder: Path) -> dict[str, set[torch.dtype]]:
    """Of a model whose state went through a checkpoint into another one's; both train on alike."""
    batch = batches(case)[0]
    made = [_model(case, plan) for _ in range(2)]
    (model, optimizer), (other, again) = made
    for _ in range(2):
        model.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    checkpoints = Checkpoints(folder)
    checkpoints.save(model, optimizer, {}, step=2)
    checkpoints.finish()
    checkpoints.load(other, again)
    for each, its in made:
        each.forward_backward(batch)
        its.step()
    for (name, mine), (_, theirs) in zip(model.whole_parameters(), other.whole_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    return {
        entry: {state[entry].dtype for state in again.state.values()} for entry in ("exp_avg", "exp_avg_sq", "step")
    }


def _model(case: Case, plan: Any) -> Any:
    model = parallelize(None, plan, device="cpu", check=False)
    return model, model.optimizer(lr=1e-3)


def test_checkpoints_keep_bf16(tmp_path: Path) -> None:
    training = Training(dropout=False, optimizer="adamw-bf16")
    case = Case(config=config("bert"), stages=[["sdp2", "sdp2", "tp2", "dp2"]], training=training, dtype=torch.float32)
    for found in ranks(2).run(_moments, case, plan_for(case), tmp_path):
        assert found == {"exp_avg": {torch.bfloat16}, "exp_avg_sq": {torch.bfloat16}, "step": {torch.float32}}


def test_loaded_states_are_narrow_again() -> None:
    """PyTorch's own ``load_state_dict`` casts states to the type of their parameter."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer, other = AdamWBF16([parameter]), AdamWBF16([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert other.state[parameter]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_fused_kernel_of_a_gpu_steps_as_the_loop() -> None:
    found = []
    for device in ("cpu", "cuda"):
        parameter = nn.Parameter(torch.linspace(-1, 1, 4097).to(device))
        optimizer = AdamWBF16([parameter], lr=1e-2, fused=True)
        for step in range(5):
            parameter.grad = torch.linspace(-2, 3, 4097).to(device) * (step + 1)
            optimizer.step()
        found.append(parameter.detach().cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, AdamWBF16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_step_is_skipped_where_a_figure_is_not_finite(kind: type[torch.optim.Optimizer], wrong: float) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=0.1, fused=True)  # type: ignore[call-arg]
    assert skips_itself(optimizer)
    seen = []
    for loss in (1.0, wrong, 1.0):
        parameter.grad = torch.full((3,), loss)
        with skipped_unless_finite(optimizer, torch.tensor(loss), torch.tensor(2.0, dtype=torch.float64)):
            optimizer.step()
        state = {
            name: float(value.flatten()[0]) for name, value in optimizer.state[parameter].items() if value is not None
        }
        seen.append((parameter.tolist(), state))
    assert seen[0] == seen[1] != seen[2]
    optimizer.step()  # no flag is left behind
    assert parameter.tolist() != seen[2][0]


def test_optimizers_that_cannot_skip_are_known() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert not skips_itself(torch.optim.AdamW([parameter], fused=False))
    assert not skips_itself(torch.optim.RMSprop([parameter]))
