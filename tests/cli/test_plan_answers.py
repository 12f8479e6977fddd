"""The options of ``galvatron plan`` that ask for more than a plan, or for less than the whole space."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

import galvatron
from galvatron.cli import app
from galvatron.core.errors import Infeasible, InvalidInput

_runner = CliRunner()
TINY = ("bert-tiny", "--cluster", "titan-rtx-8", "--batch", "32")


def _plan(*arguments: str, json_too: bool = True) -> Any:
    result = _runner.invoke(app, ["plan", *arguments, *(["--json"] if json_too else [])], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.output) if json_too else result.output


def _strategies(plan: dict[str, Any]) -> list[str]:
    return [layer["strategy"] for stage in plan["stages"] for layer in stage["layers"]]


def test_tokens_and_price_say_days_and_cost() -> None:
    said = _plan(*TINY, "--tokens", "1e9", "--price", "2.5")
    hours = 1e9 / (said["throughput"] * 512) / 3600
    assert said["answer"]["days"] == pytest.approx(hours / 24)
    assert said["answer"]["cost"] == pytest.approx(2.5 * 8 * hours)
    text = _plan(*TINY, "--tokens", "1e9", "--price", "2.5", json_too=False)
    assert f"{8 * hours:,.0f} device-hours, {2.5 * 8 * hours:,.2f} in money" in text
    per_money = said["throughput"] * 3600 / (8 * 2.5)
    assert f"{per_money:,.0f} samples for 1 in money" in _plan(*TINY, "--price", "2.5", json_too=False)
    assert "no price is known (--price)" in _plan(*TINY, "--tokens", "1e9", json_too=False)


def test_fewest_devices_fit_and_fewer_do_not() -> None:
    """Each number of devices tried by itself."""
    asked = ("bert-base", "--cluster", "titan-rtx-8", "--batch", "8", "--memory", "2GiB")
    count = _plan(*asked, "--fewest-devices")["fewest_devices"]["titan-rtx-8"]
    assert 1 < count < 8
    assert _plan(*asked, "--devices", str(count))["throughput"] > 0
    with pytest.raises(Infeasible):
        _plan(*asked, "--devices", str(count - 1))


def test_of_several_clusters_the_best_is_chosen() -> None:
    names = ("rtx4090:4", "titan-rtx-8", "l4:8")
    alone = {name: galvatron.plan("bert-tiny", name, batch=32) for name in names}
    said = _plan("bert-tiny", "--cluster", ",".join(names), "--batch", "32")
    assert {each["cluster"]: each["throughput"] for each in said["clusters"]} == {
        name: plan.throughput for name, plan in alone.items()
    }
    assert said["chosen"] == max(names, key=lambda name: alone[name].throughput)
    cheapest = max(names, key=lambda name: alone[name].throughput / alone[name].cluster.devices)
    by_price = _plan("bert-tiny", "--cluster", ",".join(names), "--batch", "32", "--by", "price", "--price", "3")
    assert by_price["chosen"] == cheapest


def test_a_cluster_that_is_too_small_says_why() -> None:
    said = _plan("llama3-8b", "--cluster", "rtx4090:1,h100:8", "--batch", "8")
    assert said["chosen"] == "h100:8"
    assert "does not fit" in said["clusters"][0]["why_not"]


def test_the_best_plans_differ_in_kind() -> None:
    said = _plan(*TINY, "--top", "3")
    plans = [each["plan"] for each in said["top"]]
    assert len(plans) == 3
    assert plans[0]["throughput"] == said["throughput"]
    speeds = [plan["throughput"] for plan in plans]
    assert speeds == sorted(speeds, reverse=True)
    kinds = {
        (len(plan["stages"]), *sorted({kind for kind in ("sdp", "tp", "dp") if _uses(plan, kind)})) for plan in plans
    }
    assert len(kinds) == 3


def _uses(plan: dict[str, Any], kind: str) -> bool:
    return any(
        axis.startswith(kind) for strategy in _strategies(plan) for axis in strategy.partition("+")[0].split("-")
    )


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        (("--pin", "encoder=tp2-dp4"), lambda plan: _strategies(plan)[1] == "tp2-dp4"),
        (("--forbid", "dp,sdp"), lambda plan: not _uses(plan, "dp") and not _uses(plan, "sdp")),
        (("--pipeline", "2"), lambda plan: len(plan["stages"]) == 2),
        (("--max-micro-batch", "4"), lambda plan: plan["batch"] / plan["micro_batches"] <= 4),
    ],
)
def test_limits_hold_and_cost_something(options: tuple[str, ...], holds: Any) -> None:
    """Without them the best plan is another one, so that each of them binds."""
    free, limited = _plan(*TINY), _plan(*TINY, *options)
    assert not holds(free)
    assert holds(limited)
    assert limited["throughput"] < free["throughput"]


def test_tensor_parallelism_stays_inside_a_level() -> None:
    """On the TITAN RTX's pairs: no TP of more than two where it must not leave them."""
    asked = ("bert-huge-32", "--cluster", "titan-rtx-8", "--batch", "8", "--space", "tp", "--pipeline", "1")
    assert any(strategy.startswith("tp8") for strategy in _strategies(_plan(*asked)))
    with pytest.raises(InvalidInput, match="tp:pair"):
        _plan(*asked, "--forbid", "tp:pair")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*TINY, "--top", "0"), "top: 0 given"),
        (("bert-tiny", "--cluster", "titan-rtx-8,l4", "--batch", "32", "--top", "2"), "--top: 2 clusters given"),
        ((*TINY, "--by", "price"), "one cluster given"),
        ((*TINY, "--by", "beauty"), "choose one of speed, price"),
        (("bert-tiny", "--cluster", "titan-rtx-8,l4", "--by", "price"), "no price is known"),
        (("bert-tiny", "--cluster", ","), "expected a cluster's name"),
        ((*TINY, "--tokens", "-1"), "-1"),
        ((*TINY, "--price", "-1"), "-1"),
        ((*TINY, "--pin", "encoder"), "expected a kind of layer and its strategy"),
        ((*TINY, "--pin", "decoder=tp8"), "decoder"),
        ((*TINY, "--pin", "encoder=tp3"), "tp3"),
        ((*TINY, "--forbid", "xp"), "xp"),
        ((*TINY, "--forbid", "tp:galaxy"), "galaxy"),
        ((*TINY, "--pipeline", "3"), "3"),
        ((*TINY, "--max-micro-batch", "0"), "max-micro-batch: 0 given"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidInput) as error:
        _plan(*arguments)
    assert said in str(error.value)
