"""Plans for long sequences: what is searched when, what files say, what is explained, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import galvatron
from galvatron.core.errors import Infeasible, InvalidInput
from galvatron.core.spec import Kind, Strategy, Training
from galvatron.families import load_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.explain import explain, request_of
from galvatron.planner.plan.lengths import longest_sequence
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.planner import try_plan
from galvatron.planner.plan.setup import request_for

_LONG = 131072


@pytest.fixture(scope="module")
def plan() -> Plan:
    return galvatron.plan("llama3-8b", "h100-8", sequence_length=_LONG)


def _strategies(plan: Plan) -> list[Strategy]:
    return [strategy for stage in plan.stages for strategy in stage.strategies]


def test_a_long_sample_is_divided(plan: Plan) -> None:
    """With a batch of one sample nothing else keeps eight devices busy."""
    assert all(own.context_degree > 1 for own in _strategies(plan)[1:-1])
    assert plan.space.context_parallel
    assert plan.certificate is not None
    assert plan.certificate.gap == 0
    assert sum(stage.time.cp_s for stage in plan.stages) > 0


def test_whole_sequences_are_slower(plan: Plan) -> None:
    whole = galvatron.plan("llama3-8b", "h100-8", sequence_length=_LONG, context_parallel=False)
    assert not any(own.context_degree > 1 for own in _strategies(whole))
    assert whole.throughput < plan.throughput


def test_files_say_all_and_read_back(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    content = json.loads(path.read_text())
    assert content["space"]["context_parallel"] is True
    assert content["model"]["kinds"][1]["context"]["key_value_heads"] == 8
    assert "cp_s" in content["stages"][0]["time"]


@pytest.mark.parametrize("options", [{}, {"context_parallel": False, "sequence_length": 32768}, {"zero3": False}])
def test_files_of_other_plans_do_not_mention_it(options: dict[str, Any]) -> None:
    """They stay as they were before there was context parallelism, byte for byte."""
    content = galvatron.plan("llama3-8b", "h100-8", batch=8, **options).to_dict()
    assert not {"context_parallel", "zero3"} & set(content["space"])
    assert all("context" not in kind for kind in content["model"]["kinds"])
    assert all("cp_s" not in stage["time"] for stage in content["stages"])


def test_what_is_searched_by_default() -> None:
    def searched(length: int, **options: Any) -> bool:
        setup: Any = {"sequence_length": length, **options}
        request = request_for("llama3-8b", "h100-8", setup)
        return request.effective_switches.context_parallel

    assert [searched(length) for length in (8192, 16383, 16384, _LONG)] == [False, False, True, True]
    assert searched(2048, context_parallel=True)
    assert not searched(_LONG, context_parallel=False)
    assert not searched(_LONG, paper=True, precision="fp32")


def test_the_digest_of_a_model_does_not_depend_on_it() -> None:
    """So that profiles and checkpoints of earlier versions are still known."""
    model = load_model("llama3-8b", Training())
    assert model.divisible
    assert model.digest == model.undivided.digest
    assert model.layers_digest == model.undivided.layers_digest
    assert not model.undivided.divisible


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("swin-huge-32", {"context_parallel": True}, "sequences of swin-huge-32 cannot be divided over devices"),
        ("t5-large-32", {"context_parallel": True}, "'galvatron check MODEL' says why"),
        ("llama3-8b", {"zero3": True}, "add --context-parallel, or drop --zero3"),
        ("llama3-8b", {"context_orders": True}, "add --context-parallel, or drop --context-orders"),
        (
            "llama3-8b",
            {"sequence_length": _LONG, "context_parallel": False, "context_orders": True},
            "which are not searched here",
        ),
        ("llama3-8b", {"sequence_length": _LONG, "context_parallel": False, "zero3": True}, "not searched here"),
        ("swin-huge-32", {"context_orders": True}, "not searched here"),
        ("llama3-8b", {"space": "sdp", "context_parallel": True}, "needs both RING and ULYSSES, which space 'sdp'"),
        ("llama3-8b", {"sequence_length": _LONG, "pin": "decoder=ulysses16"}, "is no strategy of space 'full'"),
        ("llama3-8b", {"sequence_length": _LONG, "pin": "decoder=tp2-ring4"}, "is no strategy of space 'full'"),
        ("llama3-8b", {"sequence_length": 131080, "pin": "decoder=ring4-ulysses2"}, "no multiple of 16"),
        ("llama3-8b", {"sequence_length": _LONG, "pin": "decoder=ring8", "dropout": True}, "attention has dropout"),
        (
            "llama-tiny",
            {"context_parallel": True, "batch": 8, "pin": "head=ulysses2-tp2"},
            "as no layer with attention can",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(model: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        galvatron.plan(model, "h100-8", **options)


def test_limits_reach_context_axes(plan: Plan) -> None:
    without = galvatron.plan("llama3-8b", "h100-8", sequence_length=_LONG, forbid="ulysses", batch=1)
    assert not any(own.degree(Kind.ULYSSES) > 1 for own in _strategies(without))
    assert any(own.degree(Kind.RING) > 1 for own in _strategies(without))
    assert without.throughput <= plan.throughput


def test_a_plan_by_hand_may_divide_short_sequences(tmp_path: Path) -> None:
    request = request_for("llama-tiny", "cpu-4", {"batch": 4})
    assert not request.effective_switches.context_parallel
    hand = priced(request, [["ulysses2-tp2", "ring2-ulysses2+zero3", "tp2-ring2+sp+rc", "dp2-ring2+zero2"]])
    path = tmp_path / "plan.json"
    hand.save(path)
    assert Plan.load(path) == hand
    assert hand.space.context_parallel
    with pytest.raises(
        InvalidInput, match=r"layer 1 \(decoder\).*'ulysses4' cannot run it.*2 of keys and values, do not divide"
    ):
        priced(request, [["ulysses2-tp2", "ulysses4", "dp4", "dp4"]])  # two heads of keys and values


def test_nothing_fits_without_and_the_advice_says_so() -> None:
    with pytest.raises(Infeasible) as refused:
        galvatron.plan("llama3-8b", "h100-8", sequence_length=7 * _LONG, batch=1, context_parallel=False)
    assert any("context parallelism: divide sequences over devices" in line for line in refused.value.advice)


def test_the_longest_sequence_is_the_longest(plan: Plan) -> None:
    """One step longer has no plan, and itself one: by the search, not by the question whether it fits."""
    request = replace(request_of(plan), batch=1, batch_step=None, max_batch=None)
    longest = longest_sequence(request)
    assert longest is not None

    def fits(length: int) -> bool:
        model = load_model("llama3-8b", replace(request.model.training, sequence_length=length))
        return try_plan(replace(request, model=model)) is not None

    assert longest >= _LONG
    assert fits(longest)
    step = (1 << (longest.bit_length() - 1)) // 16
    assert not fits(longest + step)


@pytest.mark.slow
def test_explanations_say_what_more_devices_buy(plan: Plan) -> None:
    found = explain(plan)
    assert [rival.space for rival in found.rivals][-1] == "full without CP"
    assert found.longest is not None
    one, twice = found.larger
    assert (one.devices, twice.devices) == (9, 16)
    assert twice.plan is not None
    assert twice.plan.throughput > 1.8 * plan.throughput
    assert twice.longest is not None
    assert twice.longest > 1.5 * found.longest


def test_axes_in_another_order_are_a_choice(tmp_path: Path) -> None:
    """Which the usual space does not hold (see above)."""
    asked: Any = {"sequence_length": _LONG, "context_orders": True, "batch": 1, "pin": "decoder=tp2-ring4+zero3+rc"}
    plan = galvatron.plan("llama3.2-1b", "h100-8", **asked)
    assert {str(layer.strategy) for stage in plan.stages for layer in stage.layers[1:-1]} == {asked["pin"][8:]}
    assert plan.space.context_orders
    plan.save(tmp_path / "plan.json")
    assert galvatron.Plan.load(tmp_path / "plan.json") == plan
