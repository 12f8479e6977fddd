"""Training is real: a small model learns a text far beyond the frequencies of its words, alike under any plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import run_to_end
from oracle import Case
from parity import plan_for
from small_models import config

import galvatron
from galvatron.train.data import open_data, unigram_entropy
from galvatron.train.settings import Settings

pytestmark = pytest.mark.slow

_CONFIG = config("gpt2", vocab_size=512, n_embd=64, n_positions=64, n_layer=2)
_SETTINGS = Settings(steps=120, learning_rate=3e-3, data="stories", tokenizer="train", evaluate_every=60)


def _plan(*stages: list[str], micro_batches: int = 1) -> galvatron.Plan:
    case = Case(config=_CONFIG, stages=list(stages), batch=16, micro_batches=micro_batches, dtype=torch.float32)
    return plan_for(case)


def test_the_same_curve_under_three_plans(tmp_path: Path) -> None:
    plans = {
        "data": _plan(["dp4", "sdp4", "dp4+zero2", "dp4"]),
        "tensor": _plan(["dp2-tp2", "tp4", "tp4+rc", "dp2-tp2"]),
        "pipeline": _plan(["dp2", "tp2"], ["sdp2", "tp2"], micro_batches=4),
    }
    runs = {name: run_to_end(tmp_path / name, plan, _SETTINGS) for name, plan in plans.items()}
    plan = plans["data"]
    assert plan.model.config is not None
    cache = tmp_path / "data" / "data"
    data = open_data("stories", plan.model.config, plan.model.training, tokenizer="train", cache=cache, held_out=0.05)
    entropy = unigram_entropy(data.train)
    curve = runs["data"].losses()
    assert curve[0] > entropy  # it knows nothing yet
    held_out = [line["evaluation_loss"] for line in runs["data"].metrics() if "evaluation_loss" in line]
    assert held_out[-1] < entropy / 2
    for run in runs.values():
        assert run.losses() == pytest.approx(curve, abs=1e-4)
