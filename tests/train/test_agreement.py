"""What is said beside a plan, or to a run that goes on, is done, refused or called unread: never ignored.

What would break: a run with another batch, precision or model than the one that was asked for, and no word of it.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from jobs import plan_of, run_to_end
from oracle import Case, first_weights
from small_models import config

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.planner.plan.options import Setup
from galvatron.planner.plan.plan import Plan
from galvatron.train.agreement import check_said
from galvatron.train.checkpoints.folder import complete
from galvatron.train.checkpoints.manifest import Manifest
from galvatron.train.inputs import check_same_model, check_weights
from galvatron.train.settings import Settings

_CASE = Case(config=config("llama"), stages=[["single"] * 4], batch=8, dtype=torch.float32)


def _plan(**changes: Any) -> Plan:
    plan = plan_of(["dp2"] * 4)
    return replace(plan, model=replace(plan.model, config={**config("llama"), **changes}))


@pytest.mark.parametrize(
    ("setup", "named"),
    [
        ({"batch": 4}, "batch: 4 given, but the plan is for 8"),
        ({"batch": "4"}, "batch: 4 given, but the plan is for 8"),
        ({"precision": "bf16"}, "precision: bf16 given, but the plan is for fp32"),
        ({"dropout": True}, "--dropout given, but the plan was made without"),
        ({"sequence_length": 77}, "sequence-length: 77 given"),
        ({"attention": "eager"}, "attention: eager given, but the plan is for fused"),
        ({"compile": True}, "--compile given, but the plan was made without"),
        ({"schedule": "gpipe"}, "schedule: gpipe given, but the plan is for 1f1b"),
        ({"memory": "1MiB"}, "memory: 1.00 MiB given, but the plan is for"),
        ({"optimizer": "sgd"}, "optimizer: sgd given, but the plan is for adamw"),
        ({"freeze": "lm_head"}, "freeze: lm_head given, but the plan was made with none"),
        ({"lora": 4}, "lora: the plan was made for other adapters, or for none"),
    ],
)
def test_what_the_plan_has_otherwise_is_refused(setup: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_said(cast("Setup", setup), _plan())
    assert named in str(refused.value)


def test_what_only_planning_reads_is_called_unread(caplog: pytest.LogCaptureFixture) -> None:
    plan = _plan()
    check_said({"space": "full", "paper": False, "batch": 8, "precision": "fp32", "dropout": False}, plan)
    check_said({"batch": "best", "memory": plan.memory_budget_bytes}, plan)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_said({"pin": "head=dp2", "pipeline": 2}, plan, cluster="h100-8")
    assert "--pin, --pipeline, --cluster: not read, because the plan is made already" in caplog.text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": 0.1}, "rms_norm_eps is 1e-06 in the run, 0.1 in the plan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, "rope_parameters is"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "num_attention_heads is"),
        ({"model_type": "mistral"}, "is for a model of type 'mistral', but the run trains 'llama'"),
    ],
)
def test_a_run_does_not_go_on_as_another_model(changes: dict[str, Any], named: str) -> None:
    check_same_model(_plan(), _plan())
    check_same_model(_plan(attention_dropout=0.5), _plan())  # how it trains, not what
    with pytest.raises(InvalidInput) as refused:
        check_same_model(_plan(**changes), _plan())
    assert named in str(refused.value)


def test_a_run_does_not_go_on_with_other_parameters_frozen() -> None:
    plan = _plan()
    frozen = replace(plan, model=replace(plan.model, training=replace(plan.model.training, freeze=("lm_head",))))
    with pytest.raises(InvalidInput, match=r"trains other parameters than the run \(freeze\)"):
        check_same_model(frozen, plan)


def test_weights_of_another_configuration_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(first_weights(_CASE), folder)
    training = Training(dropout=False)
    for changes, named in (({}, ""), ({"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1 there, 1e-06 in the plan")):
        (folder / "config.json").write_text(json.dumps({**config("llama"), **changes}), encoding="utf-8")
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="galvatron"):
            check_weights(str(folder), config("llama"), training, generic=False)
        assert named in caplog.text
        assert bool(named) == bool(caplog.text)


def test_a_run_goes_on_with_the_weight_decay_that_is_asked_for(tmp_path: Path) -> None:
    """A checkpoint has the optimizer's settings of then."""
    plan = plan_of(["dp2"] * 4)
    run_to_end(tmp_path / "run", plan, Settings(steps=1))
    again = run_to_end(tmp_path / "run", plan, Settings(steps=2, weight_decay=0.5, betas=(0.8, 0.9)))
    groups = Manifest.read(complete(again.folder.checkpoints)[-1].path).optimizer.groups
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.5, [0.8, 0.9]), (0.0, [0.8, 0.9])]


def test_a_rate_that_no_run_can_have() -> None:
    with pytest.raises(InvalidInput, match="learning-rate: inf given; expected a number above 0"):
        Settings(learning_rate=float("inf"))


def test_all_data_to_evaluate_on_are_read_and_few_that_were_held_out() -> None:
    assert Settings(evaluation_data="texts").evaluated_batches is None
    assert Settings(evaluate_every=2).evaluated_batches == 4
    assert Settings(evaluation_data="texts", evaluate_batches=2).evaluated_batches == 2
