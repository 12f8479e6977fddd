"""Checkpoints of models with experts: written under one degree of EP, read under others, exported whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from experts_oracle import ExpertCase, built, case, expert_plan, stock
from longer import longer
from oracle import batches
from ranks import ranks
from resuming import State, optimizer_for, state_of, step
from torch import Tensor

import galvatron
from galvatron.train.checkpoints.checkpoints import Checkpoints
from galvatron.train.checkpoints.export import export, export_model
from galvatron.train.checkpoints.folder import find

_SAVED = ["sdp4", "dp2-tp2/ep2-tp2", "sdp4/sdp2-ep2", "dp4"]
"""Experts divided by TP and EP in one layer, by rows and EP in the other."""


def _save(given: ExpertCase, plan: galvatron.Plan, data: list[dict[str, Tensor]], folder: Path) -> State:
    model = built(given, plan)
    optimizer = optimizer_for(given, model)
    step(model, optimizer, data[0])
    Checkpoints(folder / "run").save(model, optimizer, {}, step=1, wait=True)
    export_model(model, folder / "direct")
    return state_of(model, optimizer, data[1], {})


def _load(given: ExpertCase, plan: galvatron.Plan, data: list[dict[str, Tensor]], folder: Path) -> State:
    model = built(given, plan)
    for own in model.parameters():
        own.data.zero_()
    optimizer = optimizer_for(given, model)
    Checkpoints(folder / "run").load(model, optimizer)
    return state_of(model, optimizer, data[1], {})


@pytest.mark.parametrize(
    "plans",
    [
        longer([["dp4", "dp4/ep4", "dp2-tp2/ep2-tp2", "sdp4"], ["dp4", "dp4", "dp2-tp2", "dp4"]]),
        longer([["sdp4", "sdp4/ep4", "sdp4", "dp4"], ["dp4", "dp2-tp2/ep2-sdp2", "dp4/dp2-ep2", "dp4"]]),
    ],
)
def test_other_plans_go_on(plans: list[list[str]], tmp_path: Path) -> None:
    given = case("qwen3_moe", _SAVED)
    data = batches(given)
    first = ranks(4).run(_save, given, expert_plan(given), data, tmp_path)[0]
    for strategies in plans:
        other = case("qwen3_moe", strategies)
        for found in ranks(4).run(_load, other, expert_plan(other), data, tmp_path):
            assert found.tensors.keys() == first.tensors.keys()
            for name, own in first.tensors.items():
                assert torch.equal(found.tensors[name], own), name
            assert found.next_loss == pytest.approx(first.next_loss, rel=1e-6)
            assert set(found.scalars.values()) == {1.0}


@pytest.mark.parametrize("family", [longer("mixtral"), longer("qwen3_moe"), longer("gpt_oss")])
def test_from_pretrained_loads_it(family: str, tmp_path: Path) -> None:
    """The weights of training, in files that the stock class takes without a word."""
    given = case(family, ["sdp4", "dp4/ep4", "sdp4/sdp2-ep2", "dp4"], dtype=torch.float32)
    state = ranks(4).run(_save, given, expert_plan(given), batches(given), tmp_path)[0]
    export(find(tmp_path / "run"), tmp_path / "out")
    for folder in ("direct", "out"):
        kind = getattr(transformers, type(stock(given)).__name__)
        model, report = kind.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values()), report
        for name, own in model.named_parameters():
            assert torch.equal(own, state.tensors[name]), name
