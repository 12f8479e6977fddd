"""Plans with linear layers in float8: taken where its price is lower, and only where it was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Precision, Training
from galvatron.families import load_cluster, load_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request

_BIG = "llama3.1-8b"


def _time(strategy: str, samples: int, tokens: int) -> float:
    model = load_model(_BIG, Training(precision=Precision.BF16, float8=True, sequence_length=tokens))
    request = Request(model=model, cluster=load_cluster("h100-8"), batch=8 * samples)
    plan = priced(request, [["sdp8", *([strategy] * (len(model.layers) - 2)), "sdp8"]])
    return plan.stages[0].time.compute_s


def test_a_layer_s_time_is_counted_by_hand() -> None:
    """4096 wide, 14336 inside: of the projections, those of keys and values (1024 outputs) stay as they are."""
    device, tokens, layers = load_cluster("h100-8").device, 2048, 32
    weights = 2 * 4096 * 4096 + 3 * 4096 * 14336
    inputs, outputs = 4 * 4096 + 14336, 3 * 4096 + 2 * 14336
    assert device.float8_flops_per_s is not None
    assert device.bf16_products_flops_per_s is not None
    flops = 3 * 2 * tokens * weights * (1 / device.float8_flops_per_s - 1 / device.bf16_products_flops_per_s)
    casts = 5 * (2 * tokens * (inputs + outputs) + 2 * weights) / device.memory_bytes_per_s
    assert _time("sdp8+f8", 1, tokens) - _time("sdp8", 1, tokens) == pytest.approx(layers * (flops + casts), rel=1e-3)


def test_the_search_takes_it_only_where_it_was_asked_for(tmp_path: Path) -> None:
    setup = {"batch": 16, "sequence_length": 4096, "space": "sdp"}
    usual = galvatron.plan(_BIG, "h100-8", **setup)  # type: ignore[arg-type]
    plan = galvatron.plan(_BIG, "h100-8", **setup, float8=True)  # type: ignore[arg-type]
    assert not any("f8" in layer.strategy for stage in usual.stages for layer in stage.layers)
    assert "float8" not in usual.to_dict()["space"]
    chosen = {layer.layer: layer.strategy for stage in plan.stages for layer in stage.layers}
    assert "f8" in chosen["decoder"]
    assert "f8" not in chosen["head"]
    assert plan.iteration_s < usual.iteration_s
    plan.save(tmp_path / "plan.json")
    assert galvatron.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("model", "cluster", "more", "message"),
    [
        (_BIG, "a100-8", {}, "float8: asked for, but device 'A100-SXM4-40GB' has none"),
        (_BIG, "h100-8", {"precision": "fp32"}, "float8: asked for in fp32; it goes with --precision bf16 alone"),
        (_BIG, "h100-8", {"lora": 8}, "float8: asked for with frozen parameters or adapters"),
        ("gpt2", "h100-8", {}, "float8: no layer of gpt2 has linear layers that it is known to pay for"),
    ],
)
def test_what_cannot_be_meant_is_refused(model: str, cluster: str, more: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        galvatron.plan(model, cluster, batch=8, float8=True, **more)  # type: ignore[arg-type]
