"""The models with experts that the search is timed with: their figures against what their authors say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import galvatron
from galvatron.core.spec import Precision, Training
from galvatron.families import load_model
from moe_search import MODELS, Shape


@pytest.mark.parametrize(
    ("shape", "billions", "active"),
    list(zip(MODELS, (46.7, 30.5, 671.0), (12.9, 3.3, 37.0), strict=True)),
    ids=[shape.name for shape in MODELS],
)
def test_parameters(shape: Shape, billions: float, active: float, tmp_path: Path) -> None:
    """All of them, and those that one token uses: experts count with the share that a token goes to."""
    path = tmp_path / "model.toml"
    path.write_text(shape.text)
    model = load_model(path, Training(precision=Precision.BF16))
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.01)
    of_experts = sum(layer.experts.parameters for layer in model.layers if layer.experts)
    idle = of_experts * (1 - shape.experts_of_token / shape.experts)
    assert model.parameters - idle == pytest.approx(active * 1e9, rel=0.03)


def test_the_smallest_of_them_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(MODELS[0].text)
    plan = galvatron.plan(path, "h100-64", batch=64)
    assert plan.certificate is not None
    assert plan.certificate.gap == 0
    assert any("/" in layer.strategy for stage in plan.stages for layer in stage.layers), "some layer uses EP"
