"""The whole model, put together from what ranks hold: its first weights, its gradients, and the names of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from longer import longer
from oracle import Case, batches, first_weights, single_process, stock_model
from parity import build, plan_for
from ranks import ranks
from small_models import config
from torch import Tensor

import galvatron

_PLANS: dict[str, list[list[list[str]]]] = {
    "bert": [
        [["single"] * 4],
        [["tp4", "sdp4", "dp2-tp2", "dp4"]],
        [["tp2", "dp2"], ["sdp2", "tp2"]],
        [["sdp8", "tp2-sdp4", "dp4-tp2", "tp8"]],
    ],
    "t5": [
        [["single"] * 7],
        [["sdp4", "tp4", "dp2-sdp2", "tp2-dp2", "sdp4", "tp4", "dp4+zero2"]],
        [["tp2", "sdp2"], ["dp2", "tp2", "sdp2", "tp2", "dp2"]],
    ],
    "swin": [
        [["single"] * 7],
        [["dp4", "tp4", "sdp4", "tp2-dp2", "sdp2-tp2", "tp4", "sdp4"]],
        [["single"], ["single"] * 2, ["single"] * 2, ["single"] * 2],
    ],
}


def _initial(plan: galvatron.Plan, seed: int) -> dict[str, Tensor]:
    """On a rank: the weights a model starts with if none are given."""
    model = galvatron.parallelize(None, plan, device="cpu", seed=seed)
    return dict(model.whole_parameters())


@pytest.mark.parametrize("family", [own if own == "bert" else longer(own) for own in _PLANS])
def test_initial_weights_do_not_depend_on_the_plan(family: str) -> None:
    """Bit-equal on every rank under every plan, on one device or many; another seed gives others."""
    first: dict[str, Tensor] | None = None
    for stages in _PLANS[family]:
        case = Case(config=config(family), stages=stages)
        for whole in ranks(case.devices).run(_initial, plan_for(case), 3):
            first = first or whole
            assert whole.keys() == first.keys()
            for name, tensor in whole.items():
                assert torch.equal(tensor, first[name]), (stages, name)
    assert first is not None
    assert first.keys() == {name for name, _ in stock_model(case).named_parameters()}
    single = Case(config=config(family), stages=_PLANS[family][0])
    (other,) = ranks(1).run(_initial, plan_for(single), 4)
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def _wholes(
    case: Case, plan: galvatron.Plan, folder: Path, batch: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On a rank: parameters before, and gradients after, one batch."""
    model = build(case, plan, folder)
    parameters = {name: tensor.clone() for name, tensor in model.whole_parameters()}
    model.forward_backward(batch)
    return parameters, dict(model.whole_gradients())


@pytest.mark.parametrize("stages", _PLANS["bert"][1:3])
def test_parameters_and_gradients_by_the_stock_models_names(stages: list[list[str]]) -> None:
    """The weights that were given come back unchanged; gradients are those of a single process."""
    case = Case(config=config("bert"), stages=stages, micro_batches=2)
    given = {name: own.detach().double() for name, own in stock_model(case).named_parameters()}
    expected = single_process(case).gradients
    for parameters, gradients in ranks(4).run(_wholes, case, plan_for(case), first_weights(case), batches(case)[0]):
        assert parameters.keys() == given.keys() == gradients.keys()
        for name, tensor in given.items():
            assert torch.equal(parameters[name], tensor), name
            torch.testing.assert_close(gradients[name], expected[name], rtol=1e-8, atol=1e-12)


def _from_memory(case: Case, plan: galvatron.Plan) -> dict[str, Tensor]:
    """On a rank: from a stock model that has its weights."""
    model = galvatron.parallelize(stock_model(case), plan, device="cpu")
    return dict(model.whole_parameters())


def test_a_model_in_memory_gives_its_own_weights() -> None:
    case = Case(config=config("gpt2"), stages=[["tp4", "sdp4", "dp2-tp2", "dp4"]])
    given = {name: own.detach() for name, own in stock_model(case).named_parameters()}
    for whole in ranks(4).run(_from_memory, case, plan_for(case)):
        assert whole.keys() == given.keys()
        for name, tensor in given.items():
            assert torch.equal(whole[name], tensor), name
