"""Predicted and measured side by side: the parts add up, and the largest part of the difference is said first."""

from __future__ import annotations

import pytest
from jobs import plan_of

from galvatron.train.report import RankTimes, Report

_PLAN = plan_of(["dp2", "tp2"], ["sdp2", "dp2"], micro_batches=2)


def test_a_slow_rank_explains_the_difference() -> None:
    """Rank 3, in stage 1, works a second longer than predicted; rank 0 has the most memory of stage 0."""
    predicted = _PLAN.iteration_s
    usual = RankTimes(work_s=0.001, waiting_s=0.0, data_s=0.0, rest_s=0.0, memory_bytes=100)
    slow = RankTimes(work_s=1.0, waiting_s=0.0, data_s=0.2, rest_s=0.0, memory_bytes=50)
    full = RankTimes(work_s=0.001, waiting_s=0.0, data_s=0.0, rest_s=0.0, memory_bytes=700)
    report = Report.of(_PLAN, [full, usual, usual, slow], predicted + 1.2, [3.0, 2.0], steps=2)
    assert report.samples_per_s == pytest.approx(_PLAN.batch / (predicted + 1.2))
    assert [stage.measured.work_s for stage in report.stages] == [0.001, 1.0]
    assert [stage.measured.memory_bytes for stage in report.stages] == [700, 100]
    first, second, *_ = report.to_dict()["explanation"]
    assert first.startswith("forward and backward: +")
    assert first.endswith("(stage 1)")
    assert second.startswith("waiting for data: +200 ms")


def test_what_is_predicted_makes_up_the_iteration() -> None:
    idle = RankTimes(0.0, 0.0, 0.0, 0.0, 0)
    for stage in Report.of(_PLAN, [idle] * 4, 1.0, [1.0], steps=1).stages:
        parts = stage.predicted
        assert parts.work_s + parts.waiting_s + parts.rest_s == pytest.approx(_PLAN.iteration_s)
