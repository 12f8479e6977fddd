"""What people do by habit with a model and its parameters works, or says what to use instead."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Case, batches, first_weights, single_process
from parity import Trained, build, difference, held, plan_for
from ranks import ranks
from small_models import config
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.runtime.optimizers import AdamWBF16
from galvatron.runtime.pending_loss import PendingLoss

_MIXED = Case(config=config("gpt2"), stages=[["tp2", "sdp2"], ["dp2", "tp2"]], batch=8, micro_batches=2, clip=0.5)


def _clipping(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> Trained:
    """On a rank: the loop of many programs."""
    model = build(case, plan, folder)
    optimizer = model.optimizer(lr=case.learning_rate, **case.optimizer_options)
    losses, norms, gradients = [], [], []
    assert case.clip is not None
    for step, batch in enumerate(given):
        losses.append(float(model.forward_backward(batch)))
        if step == 0:
            gradients = [own.gradient.clone() for own in held(model)]
        own = list(model.parameters())
        if step % 2:  # the same in two steps
            norm = nn.utils.get_total_norm([each.grad for each in own if each.grad is not None])
            nn.utils.clip_grads_with_norm_(own, case.clip, norm)
        else:
            norm = nn.utils.clip_grad_norm_(own, case.clip)
        norms.append(float(norm))
        optimizer.step()
        model.zero_grad()
    return Trained(losses, norms, [replace(own, gradient=g) for own, g in zip(held(model), gradients, strict=True)])


def test_clipping_as_in_one_process() -> None:
    """Not by a rank's own norm: parameters are split over ranks and stages."""
    found = ranks(4).run(_clipping, _MIXED, plan_for(_MIXED), first_weights(_MIXED), batches(_MIXED))
    assert difference(_MIXED, found, single_process(_MIXED)) is None


def _said(call: Any) -> str:
    try:
        call()
    except (InvalidInput, AttributeError) as error:
        return str(error)
    return ""


def _step_of_muon(model: Any) -> None:
    optimizer: Any = torch.optim.Muon([own for own in model.parameters() if own.ndim == 2])
    optimizer.step()


def _habits(case: Case, plan: galvatron.Plan, batch: dict[str, Tensor]) -> dict[str, str]:
    """On a rank: what is said to each of these."""
    model: Any = galvatron.parallelize(None, plan, device="cpu")
    loss = model.forward_backward(batch)
    one = next(iter(model.parameters()))
    lbfgs: Any = torch.optim.LBFGS(model.parameters())
    said = {
        "some": _said(lambda: nn.utils.clip_grad_norm_([one], 1.0)),
        "other norm": _said(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0)),
        "call": _said(lambda: model(**batch)),
        "backward": _said(loss.backward),
        "state_dict": _said(lambda: model.state_dict()),
        "to": _said(lambda: model.to("cpu")),
        "unknown": _said(lambda: model.colour),
        "average": _said(lambda: AveragedModel(model)),
        "copy": _said(lambda: copy.deepcopy(model)),
        "adafactor": _said(lambda: model.optimizer(torch.optim.Adafactor)),
        "muon": _said(lambda: _step_of_muon(model)),
        "lbfgs": _said(lambda: lbfgs.step(lambda: 0.0)),
        "adam": _said(lambda: torch.optim.Adam(model.parameters()).step()),
    }
    handle = one.register_hook(lambda gradient: gradient)
    said["hook"] = _said(lambda: model.forward_backward(batch))
    handle.remove()
    handle = one.register_post_accumulate_grad_hook(lambda parameter: None)
    said["later hook"] = _said(lambda: model.forward_backward(batch))
    handle.remove()
    said["no hook"] = _said(lambda: model.forward_backward(batch))
    return said


def test_what_to_use_instead() -> None:
    case = Case(config=config("llama", vocab_size=64), stages=[["sdp2", "tp2", "dp2", "sdp2"]], batch=4, steps=1)
    case = replace(case, dtype=torch.float32)
    expected = {
        "some": "clip_grad_norm_: given 1 gradients of this rank's 21 and the norm 2.0; expected all",
        "other norm": "clip_grad_norm_: given 21 gradients of this rank's 21 and the norm 1.0",
        "call": "model(…): forward and backward of a batch run together; call model.forward_backward(batch)",
        "backward": "loss.backward(): forward_backward has run backward already",
        "state_dict": "'ParallelModel' object has no attribute 'state_dict': ranks hold parts of it: galvatron.Check",
        "to": "'ParallelModel' object has no attribute 'to': device and type are settled by parallelize",
        "unknown": "'ParallelModel' object has no attribute 'colour'",
        "average": "model: one rank's share of it cannot be copied",
        "copy": "model: one rank's share of it cannot be copied",
        "adafactor": "optimizer: Adafactor looks at whole tensors, but this rank has [32, 32] of",
        "muon": "optimizer: Muon looks at whole tensors, but this rank has [32, 32] of model.embed_tokens.weight",
        "lbfgs": "optimizer: LBFGS looks at the whole model at once",
        "adam": "",
        "hook": "model.embed_tokens.weight: has a hook, which would not run or see a part of the gradient",
        "later hook": "model.embed_tokens.weight: has a hook",
        "no hook": "",
    }
    for said in ranks(2).run(_habits, case, plan_for(case), batches(case)[0]):
        assert said.keys() == expected.keys()
        for name, start in expected.items():
            assert said[name].startswith(start), name
            assert bool(said[name]) == bool(start), name


def _muon(plan: galvatron.Plan, batch: dict[str, Tensor]) -> str:
    """On a rank that has all matrices whole."""
    model = galvatron.parallelize(None, plan, device="cpu")
    model.forward_backward(batch)
    return _said(lambda: _step_of_muon(model))


def test_an_optimizer_of_whole_matrices_where_they_are_whole() -> None:
    case = Case(config=config("llama"), stages=[["dp2"] * 4], batch=4, steps=1)
    assert ranks(2).run(_muon, plan_for(case), batches(case)[0]) == ["", ""]


def _modes(plan: galvatron.Plan, batch: dict[str, Tensor]) -> dict[str, float]:
    """On a rank: losses with and without dropout, and numbers made of them."""
    model = galvatron.parallelize(None, plan, device="cpu")
    exact = model.evaluate(batch)
    assert model.eval() is model
    still = float(model.forward_backward(batch))
    evaluated = float(model.evaluate(batch))
    again = float(model.forward_backward(batch))
    assert model.train() is model
    dropped = model.forward_backward(batch)
    assert 2 * dropped > dropped.detach()
    assert sum([dropped, dropped]) / 2 == round(dropped, 20) == float(dropped)
    return {"exact": float(exact), "still": still, "evaluated": evaluated, "again": again, "dropped": float(dropped)}


def test_train_and_eval() -> None:
    """As in PyTorch: ``eval()`` turns dropout off until ``train()``, whatever is evaluated in between."""
    case = Case(config=config("gpt2", resid_pdrop=0.3), stages=[["dp2"] * 4], batch=4, steps=1)
    case = replace(case, training=replace(case.training, dropout=True))
    for found in ranks(2).run(_modes, plan_for(case), batches(case)[0]):
        assert found["still"] == pytest.approx(found["exact"]) == found["evaluated"] == found["again"]
        assert found["dropped"] != pytest.approx(found["exact"])


def test_losses_compare_as_numbers() -> None:
    loss, other, none = (PendingLoss(torch.tensor(value), None) for value in (1.5, 1.5, math.nan))
    assert loss == other == 1.5
    assert loss != 2.0
    assert none != none, "the usual test for what is no number"


def test_moments_in_bf16_refuse_what_they_do_not_have() -> None:
    with pytest.raises(InvalidInput, match="amsgrad"):
        AdamWBF16([nn.Parameter(torch.zeros(2))], amsgrad=True)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamWBF16([parameter], lr=0.1)

    def closure() -> float:
        parameter.grad = torch.ones(2)
        return 3.0

    assert optimizer.step(closure) == 3.0
