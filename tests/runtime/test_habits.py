"""What people do by habit with a model and its parameters works, or says what to use instead."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import Case, batches, first_weights, single_process, stock_model
from parity import Trained, build, difference, held, plan_for
from ranks import ranks
from small_models import config
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.swa_utils import AveragedModel
from transformers import GPT2Config, GPT2LMHeadModel

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
            norm = get_total_norm([each.grad for each in own if each.grad is not None])
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


def _assigning(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> list[float]:
    """On a rank: averaged weights in the place of the last ones for an evaluation, and weights made smaller."""
    return _assigned(build(case, plan, folder), given)


def _assigned(model: Any, given: Sequence[dict[str, Tensor]]) -> list[float]:
    own = list(model.parameters())
    optimizer = torch.optim.SGD(own, lr=0.1)
    averages = [each.detach().clone() for each in own]
    losses = []
    for batch in given:
        losses.append(_passed(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        averages = [old.lerp(each.detach(), 0.5) for old, each in zip(averages, own, strict=True)]
        last = [each.data for each in own]
        for each, average in zip(own, averages, strict=True):
            each.data = average
        losses.append(_evaluated(model, batch))
        for each, before in zip(own, last, strict=True):
            each.data = before * 0.9
    return losses


def _passed(model: Any, batch: dict[str, Tensor]) -> float:
    if not isinstance(model, nn.Module):
        return float(model.forward_backward(batch))
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach())


def _evaluated(model: Any, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(model(**batch).loss if isinstance(model, nn.Module) else model.evaluate(batch))


@pytest.mark.parametrize("stages", [[["sdp2"] * 4], [["dp2+zero2"] * 4], [["sdp2+rc", "tp2"], ["sdp2", "dp2"]]])
def test_data_that_is_assigned_is_what_trains(stages: list[list[str]]) -> None:
    """``parameter.data = …`` gives it other memory than FSDP2's."""
    case = Case(config=config("gpt2"), stages=stages, batch=8, micro_batches=len(stages), dtype=torch.float64)
    world, given = 2 * len(stages), batches(case)
    expected = _assigned(stock_model(case).double(), given)
    for found in ranks(world).run(_assigning, case, plan_for(case), first_weights(case), given):
        assert found == pytest.approx(expected, rel=1e-6)


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
        "save": _said(lambda: torch.save(model, io.BytesIO())),
        "the model's gradients": _said(lambda: nn.utils.clip_grad_norm_(model, 1.0)),
        "lists": _said(lambda: model.forward_backward({name: own.tolist() for name, own in batch.items()})),
        "a number": _said(lambda: model.forward_backward({**batch, "labels": torch.tensor(1)})),
        "a count": _said(lambda: model.forward_backward({**batch, "num_items_in_batch": torch.tensor(1)})),
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
        "save": "model: it cannot be pickled (torch.save), because ranks hold parts of it: galvatron.Checkpoints saves",
        "the model's gradients": "model: it is no list of parameters; give model.parameters()",
        "lists": "batch: 'input_ids' has no rows, because it is a list and no tensor; the plan trains batches of 4 sa",
        "a number": "batch: 'labels' has no rows, because it is a single number",
        "a count": "batch: num_items_in_batch given, which no layer reads",
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


def test_losses_are_taken_for_numbers() -> None:
    """By Python and by NumPy, in lists too."""
    loss: Any = PendingLoss(torch.tensor(2.5), None)
    assert (int(loss), loss // 1, loss % 2, 2**loss, math.exp(loss)) == (2, 2.0, 0.5, 2**2.5, math.exp(2.5))
    assert np.array([loss, loss]).dtype == np.float64
    assert np.isfinite(loss)


def test_losses_are_taken_for_tensors() -> None:
    """By PyTorch's functions, in lists too, and by methods."""
    loss: Any = PendingLoss(torch.tensor([1.5, 7.0], dtype=torch.float64), None)
    assert not torch.isnan(loss)
    assert torch.equal(torch.stack([loss, loss]), torch.tensor([1.5, 1.5], dtype=torch.float64))
    assert torch.add(torch.ones(2), loss, alpha=2).tolist() == [4.0, 4.0]
    assert loss.cpu().numpy() == loss.to(torch.float32) == loss.clone() == 1.5
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = loss.colour


def _frozen_first_stage(plan: galvatron.Plan, content: dict[str, Any], given: list[dict[str, Tensor]], way: str) -> Any:
    """On a rank: the optimizer of most scripts, of what trains; on the first rank nothing does."""
    model = galvatron.parallelize(_frozen(content), plan, device="cpu", dtype=torch.float64)
    trains: list[Any] = (
        [own for own in model.parameters() if own.requires_grad]
        if way == "parameters"
        else [(name, own) for name, own in model.named_parameters() if own.requires_grad]
    )
    optimizer = torch.optim.AdamW(trains, lr=1e-2, eps=1e-3)
    for batch in given:
        model.forward_backward(batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.whole_parameters())


def _frozen(content: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    made: Any = GPT2LMHeadModel(GPT2Config(**content))
    made.transformer.requires_grad_(False)
    made.transformer.h[-1].requires_grad_(True)
    return made.train()


@pytest.mark.parametrize("way", ["parameters", "named parameters"])
def test_an_optimizer_of_what_trains_where_nothing_does(way: str) -> None:
    content = config("gpt2", tie_word_embeddings=False)
    case = Case(config=content, stages=[["single"] * 2, ["single"] * 2], batch=4, micro_batches=2, steps=2)
    alone, given = _frozen(content).double(), batches(case)
    optimizer = torch.optim.AdamW([own for own in alone.parameters() if own.requires_grad], lr=1e-2, eps=1e-3)
    for batch in given:
        logits = alone(**{name: own for name, own in batch.items() if name != "labels"}).logits[:, :-1]
        torch.autograd.backward(nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()))
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(2).run(_frozen_first_stage, plan_for(case), content, given, way):
        for name, expected in alone.named_parameters():
            torch.testing.assert_close(found[name], expected.detach(), rtol=1e-6, atol=1e-8)


def _two_frozen(plan: galvatron.Plan, content: dict[str, Any], given: list[dict[str, Tensor]]) -> str:
    """On a rank: of two models the first stage is frozen."""
    models = [galvatron.parallelize(_frozen(content), plan, device="cpu") for _ in range(2)]
    for model in models:
        model.forward_backward(given[0])
    if dist.get_rank():
        return ""  # the other rank would wait for this one
    return _said(lambda: nn.utils.clip_grad_norm_(models[0].parameters(), 0.5))


def test_clipping_one_of_several_frozen_models_is_refused() -> None:
    """PyTorch's function is given no gradient then, and says not whose."""
    content = config("gpt2", tie_word_embeddings=False)
    case = Case(config=content, stages=[["single"] * 2, ["single"] * 2], batch=4, micro_batches=2, steps=1)
    said, _ = ranks(2).run(_two_frozen, plan_for(case), content, batches(case))
    assert said.startswith("clip_grad_norm_: given no gradient of this rank (its stage is frozen)")


def test_moments_in_bf16_refuse_what_they_do_not_have() -> None:
    with pytest.raises(InvalidInput, match="amsgrad"):
        AdamWBF16([nn.Parameter(torch.zeros(2))], amsgrad=True)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamWBF16([parameter], lr=0.1)

    def closure() -> float:
        parameter.grad = torch.ones(2)
        return 3.0

    assert optimizer.step(closure) == 3.0
