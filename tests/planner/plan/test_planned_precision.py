"""Plans in TF32: what they cost beside fp32, what their files say, and where they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Precision, Training
from galvatron.families import load_cluster, load_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request


def _priced(precision: Precision) -> galvatron.Plan:
    model = load_model("bert-base", Training(precision=precision))
    request = Request(model=model, cluster=load_cluster("a100-8"), batch=64)
    return priced(request, [["dp8"] * len(model.layers)])


def test_tf32_takes_the_memory_and_traffic_of_fp32_and_the_time_of_its_own_rate() -> None:
    (tf32,), (fp32,) = _priced(Precision.TF32).stages, _priced(Precision.FP32).stages
    device = load_cluster("a100-8").device
    assert device.tf32_flops_per_s is not None
    assert tf32.memory == fp32.memory
    assert tf32.time.optimizer_s == fp32.time.optimizer_s
    work = 3 * load_model("bert-base", Training()).forward_flops * 8
    saved_s = work / device.fp32_flops_per_s - work / device.tf32_flops_per_s
    assert fp32.time.compute_s - tf32.time.compute_s == pytest.approx(saved_s, rel=1e-3)


def test_a_plan_in_tf32_is_saved_and_is_not_the_default(tmp_path: Path) -> None:
    plan = galvatron.plan("bert-tiny", "a100-8", batch=16, precision="tf32")
    plan.save(tmp_path / "plan.json")
    assert galvatron.Plan.load(tmp_path / "plan.json") == plan
    assert plan.model.training.precision is Precision.TF32
    assert galvatron.plan("bert-tiny", "a100-8", batch=16).model.training.precision is Precision.BF16


@pytest.mark.parametrize("cluster", ["titan-rtx-8", "cpu-4"])
def test_a_device_without_it_is_refused(cluster: str) -> None:
    with pytest.raises(InvalidInput, match="has no tf32 arithmetic; use --precision fp32"):
        galvatron.plan("bert-tiny", cluster, batch=16, precision="tf32")


def test_the_papers_setting_stays_as_it_is() -> None:
    with pytest.raises(InvalidInput, match="--paper means precision fp32"):
        galvatron.plan("bert-tiny", "a100-8", batch=16, precision="tf32", paper=True)
