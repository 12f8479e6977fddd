"""Plans for another optimizer than the usual: what they cost, and what their files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.families import load_cluster, load_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.explain import request_of
from galvatron.planner.plan.planner import Request


def _priced(optimizer: str) -> galvatron.Plan:
    model = load_model("bert-tiny", Training(optimizer=optimizer))
    request = Request(model=model, cluster=load_cluster("titan-rtx-8"), batch=16)
    return priced(request, [["dp4-tp2"] * len(model.layers)])


def test_states_and_step_shrink_with_what_is_kept() -> None:
    """fp32, replicated: 16 bytes a parameter with two moments, 12 with one; a step moves 28 bytes or 20."""
    (adamw,), (sgd,) = _priced("adamw").stages, _priced("sgd").stages
    assert sgd.memory.states * 16 == pytest.approx(adamw.memory.states * 12, rel=1e-5)
    assert sgd.memory.activations == adamw.memory.activations
    assert sgd.memory.transient == adamw.memory.transient
    assert sgd.time.optimizer_s * 28 == pytest.approx(adamw.time.optimizer_s * 20)
    assert sgd.time.compute_s == adamw.time.compute_s


def test_moments_in_bf16_take_half_of_their_memory_and_traffic() -> None:
    """Replicated: 4 bytes of master, 4 of gradient and 2 + 2 of moments; a step moves 4 + 4 + 4 and 4 · 2."""
    (adamw,), (narrow,) = _priced("adamw").stages, _priced("adamw-bf16").stages
    assert narrow.memory.states * 16 == pytest.approx(adamw.memory.states * 12, rel=1e-5)
    assert narrow.time.optimizer_s * 28 == pytest.approx(adamw.time.optimizer_s * 20)


def test_a_file_says_it_where_it_is_not_the_usual(tmp_path: Path) -> None:
    plan = galvatron.plan("bert-tiny", "titan-rtx-8", batch=16, optimizer="sgd")
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["model"]["training"]["optimizer"] == "sgd"
    loaded = galvatron.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert request_of(loaded).model.training.optimizer == "sgd", "plans made from it are for it, too"
    usual = galvatron.plan("bert-tiny", "titan-rtx-8", batch=16)
    assert usual == galvatron.plan("bert-tiny", "titan-rtx-8", batch=16, optimizer="adamw")
    assert "optimizer" not in usual.to_dict()["model"]["training"]
    assert usual.model.digest != plan.model.digest


@pytest.mark.parametrize("name", ["lion", "adamw"])
def test_a_file_has_one_way_to_say_it(tmp_path: Path, name: str) -> None:
    """An unknown one is named; the usual one is said by saying nothing."""
    content = galvatron.plan("bert-tiny", "titan-rtx-8", batch=16, optimizer="sgd").to_dict()
    content["model"]["training"]["optimizer"] = name
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=r"model\.training\.optimizer"):
        galvatron.Plan.load(tmp_path / "plan.json")


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(InvalidInput, match="optimizer: 'lion' is unknown; choose one of adamw, adamw-bf16, sgd"):
        galvatron.plan("bert-tiny", "titan-rtx-8", optimizer="lion")
    with pytest.raises(InvalidInput, match="--paper means optimizer adamw"):
        galvatron.plan("bert-tiny", "titan-rtx-8", optimizer="sgd", paper=True)


def test_images_are_for_models_that_read_them() -> None:
    """A model of text would be planned as if nothing was said."""
    with pytest.raises(galvatron.InvalidInput, match="image-size: 448 given, but llama3-8b reads no images"):
        galvatron.plan("llama3-8b", "h100-8", batch=64, image_size=448)
