"""What explanations, comparisons and advice claim, against plans made anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import galvatron
from galvatron import Infeasible, InvalidInput
from galvatron.core.units import GIB
from galvatron.planner.plan.advice import make_plan, smallest_budget
from galvatron.planner.plan.assumed import assumed_rates
from galvatron.planner.plan.compare import compare
from galvatron.planner.plan.explain import explain, request_of, time_shares
from galvatron.planner.plan.planner import Request, try_plan
from galvatron.planner.plan.setup import Setup, request_for


@pytest.fixture(scope="module")
def request_() -> Request:
    return request_for("bert-large", "titan-rtx-8", Setup(memory="3GiB", batch=32))


def test_a_plan_holds_the_request_it_answers(request_: Request) -> None:
    """Planning again from what a plan carries gives the same plan, to the byte."""
    plan = make_plan(request_)
    again = try_plan(request_of(plan))
    assert again is not None
    assert again.to_json() == plan.to_json()


def test_predictions_add_up(request_: Request) -> None:
    """The breakdown of each stage is its time, and stages make the iteration, by the formula of the docs."""
    plan = make_plan(request_)
    for stage in plan.stages:
        use, m = stage.time, plan.micro_batches
        steady = use.compute_s + use.tp_s + use.sdp_s + use.layout_s + use.transfer_s
        assert stage.time_s == pytest.approx(steady + (use.sync_s + use.optimizer_s) / m, rel=1e-6)
        assert stage.memory_bytes <= plan.memory_budget_bytes
    times = [stage.time_s for stage in plan.stages]
    assert plan.iteration_s == pytest.approx(sum(times) + (plan.micro_batches - 1) * max(times), rel=1e-9)
    assert sum(time_shares(plan).values()) == pytest.approx(1.0)


def test_explanations_compare_with_true_plans(request_: Request) -> None:
    explanation = explain(make_plan(request_))
    for rival in explanation.rivals:
        fresh = try_plan(replace(request_, space=rival.space))
        assert (fresh.throughput if fresh else None) == (rival.plan.throughput if rival.plan else None)
        assert rival.obstacle
    roomier = make_plan(replace(request_, memory_bytes=request_.budget_bytes + GIB))
    assert explanation.one_more_gib.throughput == roomier.throughput >= explanation.plan.throughput


def test_reasons_name_a_strategy_that_is_faster_alone(request_: Request) -> None:
    """With memory to spare every layer may take what is fastest; at a tight budget some say what they gave up."""
    tight = explain(make_plan(replace(request_, memory_bytes=int(2.3 * GIB))))
    roomy = explain(make_plan(replace(request_, memory_bytes=20 * GIB)))
    assert len(tight.reasons) == len(request_.model.layers)
    assert any("would save" in reason and "more" in reason for reason in tight.reasons)
    given_up = [sum("would save" in reason for reason in each.reasons) for each in (roomy, tight)]
    assert given_up[0] < given_up[1]


@pytest.mark.parametrize("fragmentation", [0.0, 0.02])
def test_the_smallest_budget_is_the_smallest(request_: Request, fragmentation: float) -> None:
    cluster = replace(request_.cluster, fragmentation=fragmentation)
    request_ = replace(request_, cluster=cluster)
    found = smallest_budget(replace(request_, memory_bytes=2 * GIB))
    assert found is not None
    least, batch = found
    assert batch == 32
    plan = try_plan(replace(request_, memory_bytes=least))
    assert plan is not None
    assert plan.memory_bytes - cluster.reserved_bytes <= (least - cluster.reserved_bytes) * (1 - fragmentation)
    assert try_plan(replace(request_, memory_bytes=least - 1)) is None


def test_advice_is_true() -> None:
    """Each remedy that advice names lets the same budget suffice."""
    base = Setup(memory="6GiB", batch=64, recompute=False, accumulation=False, space="sdp")
    with pytest.raises(Infeasible) as caught:
        make_plan(request_for("bert-large", "titan-rtx-8", base))
    advice = " ".join(caught.value.advice)
    assert "recompute" in advice
    assert try_plan(request_for("bert-large", "titan-rtx-8", {**base, "recompute": True})) is not None
    smaller = int(advice.split("a smaller batch, ")[1].split(":")[0])
    assert try_plan(request_for("bert-large", "titan-rtx-8", {**base, "batch": smaller})) is not None


def test_comparison_tells_out_of_memory_from_impossible() -> None:
    request = request_for("bert-base", "titan-rtx-8", Setup(batch=32))
    rows = {row[0].space: row[0] for row in compare(request, [2 * GIB]).rows}
    assert rows["tp"].plan is None
    assert rows["tp"].why_not == "not possible", "12 heads cannot be split 8 ways"
    assert rows["dp"].why_not == "out of memory"
    assert rows["full"].plan is not None


def test_python_and_command_line_share_their_options() -> None:
    plan = galvatron.plan("bert-base", "titan-rtx-8", batch=32, recompute=False, cuts="layers", schedule="gpipe")
    assert not plan.space.recompute
    assert plan.space.cuts == "layers"
    assert plan.model.training.sequence_length == 512, "what was left open is written out"
    with pytest.raises(InvalidInput, match="zigzag"):
        galvatron.plan("bert-base", "titan-rtx-8", schedule="zigzag")


def test_rates_are_those_that_the_prices_assume() -> None:
    """On the H100's preset a block of Llama 8B is far from the peak, and its head nearer; the plan's own share of peak
    is below both. One rate where there is no roofline."""
    plan = galvatron.plan("llama3-8b", "h100-8", batch=16, recompute=False)
    rates = assumed_rates(plan)
    peak = plan.cluster.facts.device.bf16_peak_flops_per_s
    assert peak is not None
    reached = 3 * plan.model.spec().forward_flops * plan.throughput / plan.cluster.devices / peak
    blocks = [rate.share for rate in rates if rate.layer == "decoder"]
    assert all(share is not None and reached < share < 591e12 / peak for share in blocks)
    assert {rate.basis for rate in rates} == {"roofline of the device"}
    assert {rate.layer for rate in rates} == {"decoder", "head"}, "an embedding has no products"
    titan = assumed_rates(galvatron.plan("bert-large", "titan-rtx-8", batch=8))
    assert {(round(rate.flops_per_s), rate.share, rate.basis) for rate in titan} == {
        (9 * 10**12, None, "one rate of the device")
    }
    measured = assumed_rates(galvatron.plan("bert-huge-32", "titan-rtx-8", batch=8, paper=True))
    assert {rate.basis for rate in measured if rate.layer == "encoder"} == {"measured"}
    assert not assumed_rates(galvatron.plan("llama3-8b", "h100-8", batch=16, lora=8))


def test_deep_pipelines_of_the_papers_setting_have_more_micro_batches(tmp_path: Path) -> None:
    """Four on 8 devices, one for two stages beyond; who says how many gets no more. The file says so, and is read."""
    plan = galvatron.plan("bert-huge-32", "titan-rtx-16", batch=16, space="pp", paper=True)
    assert (plan.pipeline_degree, plan.micro_batches) == (16, 8)
    plan.save(tmp_path / "plan.json")
    read = galvatron.Plan.load(tmp_path / "plan.json")
    assert read == plan
    again = try_plan(request_of(read))
    assert again is not None
    assert again.to_json() == plan.to_json()
    (tmp_path / "plan.json").write_text(
        plan.to_json().replace('"stages_a_micro_batch": 2', '"stages_a_micro_batch": 4')
    )
    with pytest.raises(InvalidInput, match="max_micro_batches: 4, but the plan has 8"):
        galvatron.Plan.load(tmp_path / "plan.json")
    told = galvatron.plan("bert-huge-32", "titan-rtx-16", batch=16, space="pp", paper=True, max_micro_batches=4)
    assert told.micro_batches == 4
    small = galvatron.plan("bert-huge-32", "titan-rtx-8", batch=16, space="pp", paper=True)
    assert small.micro_batches == 4
    assert "stages_a_micro_batch" not in small.to_json()
