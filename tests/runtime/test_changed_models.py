"""Models in memory that people have changed, where they run: as in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from changing import DROPPING, TP, changed, losses_of, refusal, squares, trained
from oracle import Case, batches, stock_model
from parity import cluster_of, plan_for
from ranks import ranks
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import schedule_named
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request


@pytest.mark.parametrize("strategy", ["dp2", "sdp2+rc"])
@pytest.mark.parametrize(
    "change", ["method", "method of the head", "head of another class", "several modules as head", "shared inside"]
)
def test_forwards_of_ones_own_run_where_modules_stay_whole(change: str, strategy: str) -> None:
    case = replace(TP, stages=[[strategy] * 4], steps=3)
    given = batches(case)
    expected = trained(changed(case, change), given)
    for found in ranks(2).run(losses_of, case, plan_for(case), given, change):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", ["dp2", "tp2"])
def test_a_model_in_evaluation_mode_does_not_drop_out(strategy: str) -> None:
    """Until it is to: as in PyTorch."""
    case = replace(DROPPING, stages=[[strategy] * 4], steps=3)
    given = batches(case)
    expected = trained(changed(case, "evaluation"), given)
    for found in ranks(2).run(losses_of, case, plan_for(case), given, "evaluation"):
        assert found[:2] == pytest.approx(expected[:2], rel=1e-5)
        assert found[2] != pytest.approx(expected[2], rel=1e-5), "other random numbers than one process's"


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "sdp2+rc"])
def test_a_part_in_evaluation_mode_stays_so(strategy: str) -> None:
    """A frozen tower, say, also where the model is put into training mode again."""
    case = replace(DROPPING, stages=[[strategy] * 4], steps=3)
    given = batches(case)
    expected = trained(changed(case, "evaluation"), given, turns=False)
    for found in ranks(2).run(losses_of, case, plan_for(case), given, "part in evaluation"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("change", ["other activation", "last norm"])
def test_what_computes_a_part_as_it_computes_all_may_change(change: str) -> None:
    """Activations element by element, and what is beside the head, with TP too."""
    assert ranks(2).run(refusal, TP, plan_for(TP), change) == ["", ""]


@pytest.mark.parametrize("change", ["split hook", "region hook", "activation", "norm"])
def test_what_is_changed_in_a_module_that_is_not_split_runs(change: str) -> None:
    """Elsewhere hooks and modules are what they were: under DP those of projections too."""
    case = replace(TP, stages=[["dp2"] * 4])
    assert ranks(2).run(refusal, case, plan_for(case), change) == ["", ""]


@pytest.mark.parametrize(("strategy", "expected"), [("tp2", ""), ("tp2+sp", "layer 'decoder': block has a hook")])
def test_what_is_changed_around_regions_sees_all_tokens_or_is_refused(strategy: str, expected: str) -> None:
    case = replace(TP, stages=[["tp2", strategy, strategy, "tp2"]])
    for said in ranks(2).run(refusal, case, plan_for(case), "norm"):
        assert said.startswith(expected)
        assert bool(said) == bool(expected)


def test_the_hooks_with_which_transformers_collects_outputs_are_nobodys() -> None:
    assert ranks(2).run(refusal, TP, plan_for(TP), "outputs") == ["", ""]


@pytest.mark.parametrize("change", ["backbone hook", "region hook", "activation"])
def test_unknown_families_run_as_they_are_where_nothing_is_split(change: str) -> None:
    """A small copy made from the configuration knows of no change, so that comparing it shows nothing."""
    case = replace(TP, stages=[["tp2"] * 4])
    spec = galvatron.describe(stock_model(case), batches(case)[0], case.training)
    request = Request(model=spec, cluster=cluster_of(2), batch=4, schedule=schedule_named("1f1b"))
    for said in ranks(2).run(refusal, case, priced(request, case.stages, micro_batches=1), change):
        assert bool(said) == (change != "backbone hook")


# Known families that were described


def _described(case: Case, plan: galvatron.Plan, batch: dict[str, Tensor]) -> tuple[float, str]:
    """On a rank: the loss under a plan for what ``describe`` found, and with a loss of the user's."""
    model = galvatron.parallelize(stock_model(case), plan, device="cpu", check=False)
    with_squares = galvatron.parallelize(stock_model(case), plan, device="cpu", check=False, loss=squares)
    return float(model.forward_backward(batch)), f"{float(with_squares.forward_backward(batch)):.6f}"


def test_a_described_llama_is_run_as_it_was_described() -> None:
    """Its layers are then those of a model without a family, in the plan and on ranks; a loss of the user's is used."""
    (batch,) = batches(TP)
    model: Any = stock_model(TP)
    spec = galvatron.describe(model, batch, TP.training)
    assert spec.family == "generic"
    request = Request(model=spec, cluster=cluster_of(2), batch=4, schedule=schedule_named("1f1b"))
    plan = priced(request, [["dp2", "tp2", "sdp2", "dp2"]], micro_batches=2)
    with torch.no_grad():
        output = model(**batch)
    squares = float(output.logits.square().mean()) * 8 / 7  # the last token of a sample has no target
    for loss, other in ranks(2).run(_described, TP, plan, batch):
        assert loss == pytest.approx(float(output.loss), rel=1e-5)
        assert float(other) == pytest.approx(squares, rel=1e-4)


@pytest.mark.parametrize("stages", [[["dp2"] * 4], [["single"] * 2, ["single"] * 2]])
def test_a_described_llama_trains_weights_that_it_shares(stages: list[list[str]]) -> None:
    """Across stages, too."""
    case = replace(TP, stages=stages, steps=3)
    given = batches(case)
    spec = galvatron.describe(changed(case, "shared weight"), given[0], case.training)
    request = Request(model=spec, cluster=cluster_of(2), batch=4, schedule=schedule_named("1f1b"))
    plan = priced(request, stages, micro_batches=2)
    expected = trained(changed(case, "shared weight"), given)
    for found in ranks(2).run(losses_of, case, plan, given, "shared weight"):
        assert found == pytest.approx(expected, rel=1e-5)


def test_weights_that_blocks_share_are_not_split(caplog: pytest.LogCaptureFixture) -> None:
    (batch,) = batches(TP)
    spec = galvatron.describe(changed(TP, "shared weight"), batch, TP.training)
    assert all(kind.tensor_parallel is None for kind in spec.kinds)
    assert "its blocks share weights, which TP cannot split" in caplog.text


def test_a_model_with_other_parameters_than_its_configurations_is_described_first() -> None:
    """Models of unknown family are planned by their configuration alone."""
    config = Qwen3Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    galvatron.plan(model, "cpu-4", devices=1, batch=8)
    model.lm_head = torch.nn.Linear(8, 16, bias=True)
    with pytest.raises(InvalidInput, match=r"parameter lm_head.bias is \(16,\), by its configuration missing"):
        galvatron.plan(model, "cpu-4", devices=1, batch=8)
