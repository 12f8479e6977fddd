"""Several machines: the slow cable is found, the pipeline goes across it, and training is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import plan_of, run_to_end
from two_nodes import nodes, why_not

import galvatron
from galvatron.train.metrics import read_metrics
from galvatron.train.settings import Settings
from galvatron.zoo import load_cluster

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

_MEGABITS_PER_S = 100
_STEPS = 6


def test_from_profile_to_trained_model(tmp_path: Path) -> None:
    whole = plan_of(["single"] * 4)
    with nodes(_MEGABITS_PER_S) as pair:
        pair.torchrun(2, "galvatron", "profile", "cluster", "--output", str(tmp_path / "cluster.toml"), "--fresh")
        cluster = load_cluster(tmp_path / "cluster.toml")
        assert [level.units for level in cluster.levels] == [2, 2]
        inside, between = cluster.levels
        assert between.bytes_per_s < _MEGABITS_PER_S * 1e6 / 8 * 1.2  # what the cable carries, and no more
        assert inside.bytes_per_s > 3 * between.bytes_per_s
        plan = galvatron.plan(whole.model.spec(), cluster, batch=8)  # Takeaway #1
        assert [stage.devices for stage in plan.stages] == [(0, 1), (2, 3)]
        plan.save(tmp_path / "plan.json")
        run = str(tmp_path / "run")
        pair.torchrun(2, "galvatron", "train", str(tmp_path / "plan.json"), "--out", run, "--steps", str(_STEPS))
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    alone = run_to_end(tmp_path / "alone", whole, Settings(steps=_STEPS))
    assert losses == pytest.approx(alone.losses(), abs=1e-4)
