"""Plans in TF32: what they cost beside fp32, what their files say, and where they are refused."""

from __future__ import annotations

from dataclasses import replace
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


def _priced_by_one_rate(precision: Precision) -> galvatron.Plan:
    model = load_model("bert-base", Training(precision=precision))
    cluster = load_cluster("a100-8")
    device = replace(cluster.device, bf16_products_flops_per_s=None, bf16_attention_flops_per_s=None)
    request = Request(model=model, cluster=replace(cluster, device=device), batch=64)
    return priced(request, [["dp8"] * len(model.layers)])


def test_tf32_takes_the_memory_and_traffic_of_fp32_and_the_time_of_its_own_rate() -> None:
    (tf32,), (fp32,) = (_priced_by_one_rate(each).stages for each in (Precision.TF32, Precision.FP32))
    device = load_cluster("a100-8").device
    assert device.tf32_flops_per_s is not None
    assert tf32.memory == fp32.memory
    assert tf32.time.optimizer_s == fp32.time.optimizer_s
    work = 3 * load_model("bert-base", Training()).forward_flops * 8
    saved_s = work / device.fp32_flops_per_s - work / device.tf32_flops_per_s
    assert fp32.time.compute_s - tf32.time.compute_s == pytest.approx(saved_s, rel=1e-3)


def test_by_a_roofline_tf32_has_half_the_rates_of_bf16_and_twice_its_bytes() -> None:
    """So a layer without attention takes twice as long, whatever bounds it."""
    device = load_cluster("a100-8").device
    half, full = (device.roofline(each, compiled=False) for each in (Precision.TF32, Precision.BF16))
    assert half is not None
    assert full is not None
    assert 2 * half.products_flops_per_s == full.products_flops_per_s
    assert 2 * half.attention_flops_per_s == full.attention_flops_per_s
    assert half.traffic == full.traffic
    assert device.roofline(Precision.FP32, compiled=False) is None
    (tf32,), (fp32,) = _priced(Precision.TF32).stages, _priced(Precision.FP32).stages
    assert tf32.time.compute_s < fp32.time.compute_s / 3


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


def test_the_papers_setting_is_tf32_where_a_gpu_has_it() -> None:
    """PyTorch of those years multiplied so by default; TITAN RTX and processors cannot."""

    def chosen(cluster: str, **said: str) -> Precision:
        made = galvatron.plan("bert-tiny", cluster, batch=16, paper=True, **said)  # type: ignore[arg-type]
        return made.model.training.precision

    assert chosen("a100-8") is Precision.TF32
    assert chosen("a100-8", precision="fp32") is Precision.FP32
    assert chosen("titan-rtx-8") is Precision.FP32
    with pytest.raises(InvalidInput, match="--paper means precision fp32"):
        chosen("a100-8", precision="bf16")
    with pytest.raises(InvalidInput, match="has no tf32 arithmetic"):
        chosen("titan-rtx-8", precision="tf32")
