"""Advice when nothing fits: each line is a command that works, at the speed that it says."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

import galvatron
from galvatron.core.errors import Infeasible
from galvatron.planner.plan import advice
from galvatron.planner.plan.advice import make_plan
from galvatron.planner.plan.options import Setup
from galvatron.planner.plan.setup import request_for

PRICED = re.compile(r"([0-9.e+]+) samples/s at batch (\d+) \((--.*)\)$")

OLD = Setup(
    memory="7GiB",
    batch=32,
    schedule="gpipe",
    attention="eager",
    max_micro_batches=2,
    recompute=False,
    fused_loss=False,
    zero2=False,
    sequence_parallel=False,
    accumulation=False,
)


@pytest.mark.parametrize(
    ("model", "cluster", "setup", "options"),
    [
        ("bert-huge-48", "titan-rtx-8", OLD, {"--batch", "--recompute", "--sequence-length"}),
        ("bert-huge-48", "titan-rtx-8", Setup(memory="4GiB", batch=32, space="dp"), {"--space"}),
        (
            "bert-large",
            "rtx4090:1",
            Setup(memory="6.5GiB", precision="fp32", batch=16, recompute=False),
            {"--optimizer"},
        ),
    ],
)
def test_each_line_of_advice_is_true(
    model: str, cluster: str, setup: Setup, options: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "_PRICING_S", 3)  # a slow machine, too, prices each option to its end
    with pytest.raises(Infeasible) as caught:
        make_plan(request_for(model, cluster, setup))
    seen = set()
    for line in caught.value.advice:
        match = PRICED.search(line)
        if match is None:
            assert any(each in line for each in ("more devices", "fits", "not tried")), line
            continue
        option, _, value = match[3].partition(" ")
        seen.add(option)
        name = option[2:].replace("-", "_")
        given: object = True if not value else int(value) if value.isdigit() else value
        plan = cast("Any", galvatron.plan)(model, cluster, **{**setup, name: given})
        assert plan.batch == int(match[2])
        assert float(match[1]) == pytest.approx(plan.throughput, rel=0.03 if "about" in line else 0.006)
        assert "at least" not in line
    assert options <= seen, caught.value.advice


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.05, 0.1])
def test_advice_that_ran_out_of_time_says_no_more_than_it_knows(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "_PRICING_S", seconds)
    with pytest.raises(Infeasible) as caught:
        make_plan(request_for("bert-huge-48", "titan-rtx-8", OLD))
    for line in caught.value.advice:
        if (match := PRICED.search(line)) and match[3].startswith("--recompute"):
            plan = make_plan(request_for("bert-huge-48", "titan-rtx-8", OLD | {"recompute": True}))
            exact = pytest.approx(plan.throughput, rel=0.006)
            assert float(match[1]) == exact or ("at least" in line and float(match[1]) < plan.throughput)


def test_advice_goes_with_a_pinned_layer() -> None:
    """Adapters would rename it: that is no advice then, and no error about the pin."""
    with pytest.raises(Infeasible) as caught:
        galvatron.plan("llama3-8b", "h100-8", batch=8, pin="decoder=dp8")
    assert "does not fit" in str(caught.value)
    assert not any("adapters" in line for line in caught.value.advice)


def test_what_fits_on_no_eight_devices_is_advised_more_of_them() -> None:
    with pytest.raises(Infeasible) as caught:
        galvatron.plan("llama2-70b", "a100-8")
    assert "more devices" in str(caught.value.advice)
