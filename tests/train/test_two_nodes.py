"""Several machines: the slow cable is found, the pipeline goes across it, training is that of one process, and a lost
machine is named by the other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import plan_of, run_to_end
from oracle import Case
from parity import plan_for
from small_models import config
from two_nodes import Node, Nodes, nodes, why_not

import galvatron
from galvatron.families import load_cluster
from galvatron.train.metrics import read_metrics
from galvatron.train.run_folder import RunFolder
from galvatron.train.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

_MEGABITS_PER_S = 100
_STEPS = 6
_TIMEOUT_S = 12.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Nodes]:
    with nodes(_MEGABITS_PER_S, tmp_path) as made:
        yield made


def test_from_profile_to_trained_model(tmp_path: Path, pair: Nodes) -> None:
    larger = config("bert", hidden_size=128, intermediate_size=512, num_hidden_layers=4)
    whole = plan_for(Case(config=larger, stages=[["single"] * 6], batch=8, dtype=torch.float32))
    pair.run("galvatron", "profile", "cluster", "--rounds", "3", "--output", str(tmp_path / "cluster.toml"))
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert [level.units for level in cluster.levels] == [2, 2]
    inside, between = cluster.levels
    carried = _MEGABITS_PER_S * 1e6 / 8
    assert carried / 2 < between.bytes_per_s < 2 * carried
    assert between.transfer_bytes_per_s is not None
    assert carried / 2 < between.transfer_bytes_per_s < 2 * carried
    assert between.shared
    assert inside.bytes_per_s > 5 * carried
    plan = galvatron.plan(whole.model.spec(), cluster, batch=8)  # Takeaway #1
    assert [stage.devices for stage in plan.stages] == [(0, 1), (2, 3)]
    plan.save(tmp_path / "plan.json")
    folder = RunFolder(tmp_path / "run")
    pair.run("galvatron", "train", str(tmp_path / "plan.json"), "--out", str(folder.path), "--steps", str(_STEPS))
    losses = [line["loss"] for line in read_metrics(folder.metrics_file)]
    assert losses == pytest.approx(run_to_end(tmp_path / "alone", whole, Settings(steps=_STEPS)).losses(), abs=1e-4)


@pytest.mark.parametrize("cable", ["stays", "goes too"])
def test_a_lost_machine_ends_the_other_and_its_ranks_are_named(tmp_path: Path, pair: Nodes, cable: str) -> None:
    """Its connections break when its processes are killed; when its power fails nothing is heard any more."""
    told = _lost(tmp_path, pair, pair.second, cable, "5min" if cable == "stays" else f"{_TIMEOUT_S:g}s")
    assert told["ranks"] == [2, 3]
    for rank in (2, 3):
        assert f"rank {rank} (stage 1" in told["message"]
    assert f"on {pair.second.name}" in told["message"]
    assert "no sign of life" in told["message"]


def test_so_does_a_lost_machine_through_which_the_ranks_met(tmp_path: Path, pair: Nodes) -> None:
    told = _lost(tmp_path, pair, pair.first, "goes too", f"{_TIMEOUT_S:g}s")
    assert told["ranks"] == [0, 1]
    assert f"{pair.first.name} with ranks 0, 1 is lost" in told["message"]


def _lost(tmp_path: Path, pair: Nodes, lost: Node, cable: str, timeout: str) -> dict[str, Any]:
    """What the other one says, soon."""
    plan_of(["dp2", "tp2"], ["sdp2", "dp2"], micro_batches=2).save(tmp_path / "plan.json")
    folder = RunFolder(tmp_path / "run")
    options = ("--steps", "100000", "--timeout", timeout)
    pair.start("galvatron", "train", str(tmp_path / "plan.json"), "--out", str(folder.path), *options)
    _wait_for_step(folder, 3, pair)
    if cable == "goes too":
        lost.pull_the_cable()
    lost.kill()
    started = time.monotonic()
    other = pair.second if lost is pair.first else pair.first
    assert other.end(60) != 0
    assert time.monotonic() - started < 2 * _TIMEOUT_S + 10
    told: dict[str, Any] = json.loads(folder.failure_file.read_text())
    assert f"error: {told['message']}" in other.said()
    return told


def _wait_for_step(folder: RunFolder, step: int, pair: Nodes) -> None:
    end = time.monotonic() + 120
    while not any(line["step"] >= step for line in read_metrics(folder.metrics_file)):
        assert pair.first.runs(), pair.first.said()
        assert time.monotonic() < end, pair.first.said() + pair.second.said()
        time.sleep(0.1)
