"""The table's stock programs train the stock model: losses of several steps equal those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import ranks

from galvatron.families import load_model
from galvatron.planner.plan.plan import Plan
from programs import build
from stock import batch_for, stock_model
from systems import Setting, choose, system_named
from workloads import Workload, tiny, tiny_cluster

WORLD, STEPS = 4, 3


def _plan(model: str, system: str) -> Plan:
    """What the system would run, of a model without dropout."""
    spec = tiny(model).model
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout_rate": 0.0, "drop_path_rate": 0.0}
    config = {**spec.config, **calm}  # type: ignore[dict-item]
    workload = Workload(model=replace(load_model(config, spec.training), name=model), profile=None)
    setting = Setting(workload=workload, cluster=tiny_cluster(WORLD), budget_bytes=10**9, max_batch=8)
    return choose(setting, system_named(system)).plan


def _losses(system: str, plan: Plan) -> list[float | None]:
    """On a rank."""
    step = build(system, "stock", plan, torch.device("cpu"))
    losses = [step() for _ in range(STEPS)]
    return [None if loss is None else loss.item() for loss in losses]


def _alone(plan: Plan, parts: int) -> list[float]:
    """One process: the loss is the mean of so many equal parts of the batch."""
    model: Any = stock_model(plan, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    each = plan.batch // parts
    losses = []
    for _ in range(STEPS):
        rows = [{n: t[i * each : (i + 1) * each] for n, t in batch_for(plan).items()} for i in range(parts)]
        loss = torch.stack([model(**part).loss for part in rows]).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("model", "system"),
    [
        pytest.param("bert-huge-32", "dp", marks=pytest.mark.slow),
        pytest.param("bert-huge-32", "tp", marks=pytest.mark.slow),
        ("bert-huge-32", "pp"),
        ("vit-huge-32", "tp"),
        pytest.param("vit-huge-32", "pp", marks=pytest.mark.slow),
        *[
            pytest.param(model, system, marks=pytest.mark.slow)
            for model in ("vit-huge-32", "t5-large-32", "swin-huge-32")
            for system in ("dp", "sdp")
        ],
        pytest.param("bert-huge-32", "sdp", marks=pytest.mark.slow),
    ],
)
def test_trains_as_one_process_does(model: str, system: str) -> None:
    plan = _plan(model, system)
    divided = system in ("dp", "sdp")
    expected = _alone(plan, WORLD if divided else 1)
    found = ranks(WORLD).run(_losses, system, plan)
    if divided:  # each rank has the loss of its own rows
        means = [sum(rank[step] for rank in found) / WORLD for step in range(STEPS)]
        assert means == pytest.approx(expected, rel=1e-4)
    else:
        known = [rank for rank in found if rank[0] is not None]
        assert len(known) == (1 if system == "pp" else WORLD)
        assert all(rank == pytest.approx(expected, rel=1e-4) for rank in known)
    assert expected[0] != pytest.approx(expected[-1], rel=1e-3)  # it does train
