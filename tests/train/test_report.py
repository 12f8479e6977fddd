"""Predicted and measured side by side: the parts add up, and the largest part of the difference is said first."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from jobs import plan_of
from rich.console import Console

from galvatron.measure.cache import provenance
from galvatron.measure.figures import Quality
from galvatron.processes.cores import Moment, shares
from galvatron.train.report import RankTimes, Report, report_view

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


def _shown(report: Report) -> str:
    screen = StringIO()
    Console(file=screen, width=300).print(report_view(_PLAN, report))
    return screen.getvalue()


def test_what_the_allocator_lost_is_said() -> None:
    gib = 1 << 30
    usual = RankTimes(0.0, 0.0, 0.0, 0.0, 8 * gib)
    assert "allocator held" not in _shown(Report.of(_PLAN, [usual] * 4, 1.0, [1.0], steps=1)), "not known on the CPU"
    full = replace(usual, memory_bytes=9 * gib, held_bytes=10 * gib)
    shown = _shown(Report.of(_PLAN, [usual, full, usual, usual], 1.0, [1.0], steps=1))
    assert "PyTorch's allocator held 10.0 GiB, 1.00 GiB (10.0%) of them beside tensors" in shown
    assert "ran short" not in shown
    short = _shown(Report.of(_PLAN, [usual, replace(full, shortages=12), full, usual], 1.0, [1.0], steps=1))
    assert "it ran short of memory 12 times after the first step" in short


def test_a_busy_machine_is_said_instead_of_a_difference() -> None:
    """Eighteen times the predicted time, while others had nine tenths of the cores."""
    idle = RankTimes(0.0, 0.0, 0.0, 0.0, 0)
    quiet = Report.of(_PLAN, [idle] * 4, 18.2 * _PLAN.iteration_s, [1.0], steps=1)
    assert "(+1720.0%)" in _shown(quiet)
    busy = _shown(replace(quiet, disturbed=0.9))
    assert "(the machine was busy: other programs had 90% of its cores)" in busy
    assert "1720" not in busy
    fast = Report.of(_PLAN, [idle] * 4, _PLAN.iteration_s, [1.0], steps=1)
    assert "(+0.0%)" in _shown(replace(fast, disturbed=0.9)), "what came out as predicted was not disturbed"


def test_a_profile_from_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = RankTimes(0.0, 0.0, 0.0, 0.0, 0)
    report = Report.of(_PLAN, [idle] * 4, _PLAN.iteration_s, [1.0], steps=1)
    for spread, said in ((0.2, False), (0.6, True)):
        source = provenance("4 × CPU", Quality(rounds=5, spread=spread, repeatability=0.1))
        facts = replace(_PLAN.cluster.facts, source=source)
        monkeypatch.setattr(f"{__name__}._PLAN", replace(_PLAN, cluster=replace(_PLAN.cluster, facts=facts)))
        assert ("links were measured while the machine was busy" in _shown(report)) is said


def test_what_others_had_is_what_the_machine_did_besides_us() -> None:
    before, after = Moment(10.0, 1.0, 100.0), Moment(14.0, 3.0, 100.0 + 7.0)
    found = shares(before, after, ours_s=5.0)
    assert found.disturbed * found.cores == pytest.approx((7.0 - 5.0) / 4.0)
