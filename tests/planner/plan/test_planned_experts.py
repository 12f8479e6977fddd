"""Plans of models with experts: what the file, the explanation and errors say of axes of the experts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from sparse_layer import sparse_layer

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Strategy
from galvatron.planner.plan.explain import explain
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.render import explanation_view

MODEL = f"""
name = "few-experts"

[[layers]]
name = "dense"
count = 2
parameters = 50_000_000
forward_flops = 200e9
activation_bytes = "64MiB"
boundary_bytes = "8MiB"
tensor_parallel = {{ heads = 16 }}
{sparse_layer("sparse", count=6, experts=16)}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "few-experts.toml"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    return galvatron.plan(model, "a100-8", batch=32, memory="24GiB")


def test_the_best_plan_divides_the_experts(plan: Plan, model: Path) -> None:
    strategies = {layer.layer: Strategy.parse(layer.strategy) for stage in plan.stages for layer in stage.layers}
    assert strategies["sparse"].experts
    assert not strategies["dense"].experts
    assert sum(stage.time.ep_s for stage in plan.stages) > 0
    assert plan.certificate is not None
    assert plan.certificate.gap == 0
    without = galvatron.plan(model, "a100-8", batch=32, memory="24GiB", expert_parallel=False)
    assert plan.throughput > without.throughput


def test_the_file_reads_back_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["space"]["expert_parallel"] is True
    assert [kind["name"] for kind in content["model"]["kinds"] if "experts" in kind] == ["sparse"]
    assert all("ep_s" in stage["time"] for stage in content["stages"])


def test_files_of_other_models_do_not_mention_experts() -> None:
    content = json.dumps(galvatron.plan("bert-base", "titan-rtx-8", batch=8).to_dict())
    assert "expert" not in content
    assert "ep_s" not in content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "dp8/ep2-dp4", "layer": "dense"}, "divides experts, but 'dense' has no experts"),
        ({"strategy": "dp8/dp2-ep4", "off": True}, "has ep, which space.expert_parallel says was off"),
        ({"count": 3}, "does not match the model's facts"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(plan: Plan, tmp_path: Path, change: dict[str, object], message: str) -> None:
    content = plan.to_dict()
    if "strategy" in change:
        wanted = change.get("layer", "sparse")
        layer = next(one for stage in content["stages"] for one in stage["layers"] if one["layer"] == wanted)
        layer["strategy"] = change["strategy"]
    if change.get("off"):
        content["space"]["expert_parallel"] = False
    if "count" in change:
        next(kind for kind in content["model"]["kinds"] if kind["name"] == "sparse")["experts"]["count"] = 3
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=message):
        Plan.load(tmp_path / "plan.json")


def test_a_given_imbalance_is_in_the_file_and_slows_experts(plan: Plan, model: Path, tmp_path: Path) -> None:
    """The busiest device computes and receives more; where experts follow the rest of a layer nothing changes."""
    options = {"batch": 32, "memory": "24GiB"}
    busier = galvatron.plan(model, "a100-8", expert_imbalance=1.5, **options)  # type: ignore[arg-type]
    assert busier.throughput < plan.throughput
    busier.save(tmp_path / "plan.json")
    kinds = json.loads((tmp_path / "plan.json").read_text())["model"]["kinds"]
    assert [kind["experts"]["imbalance"] for kind in kinds if "experts" in kind] == [1.5]
    assert Plan.load(tmp_path / "plan.json") == busier
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(explanation_view(explain(busier)))
    assert "the busiest device has 1.5 times the mean of their tokens" in console.export_text()
    off = [
        galvatron.plan(model, "a100-8", expert_parallel=False, expert_imbalance=factor, **options)  # type: ignore[arg-type]
        for factor in (1.0, 1.5)
    ]
    assert off[0].throughput == off[1].throughput


@pytest.mark.parametrize(
    ("name", "factor", "message"),
    [
        (None, 0.9, "expert-imbalance: 0.9 given; expected the tokens of the busiest device over the mean, from 1"),
        (None, float("nan"), "expert-imbalance: nan given"),
        ("bert-base", 1.2, "expert-imbalance: 1.2 given, but bert-base has no experts; leave it out"),
    ],
)
def test_an_imbalance_that_cannot_be_is_refused(model: Path, name: str | None, factor: float, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        galvatron.plan(name or model, "a100-8", batch=32, expert_imbalance=factor)


def test_the_explanation_names_them(plan: Plan) -> None:
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(explanation_view(explain(plan)))
    text = console.export_text()
    assert "experts: " in text
    assert "divided" in text
    assert "expert parallel" in text
