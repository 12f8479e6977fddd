"""Faults, in real processes: what stops a job stops all of it, soon, says who and when, and loses nothing saved."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from injecting import alter, fail, fail_at, other_labels, spoil, stall, stall_writing, starve
from jobs import Job, plan_of, run_to_end
from longer import longer

from galvatron.core.errors import NonFinite, OutOfMemory, RankFailure, Unequal
from galvatron.train.checkpoints.folder import complete
from galvatron.train.settings import Settings

_ENDLESS = Settings(steps=100_000, save_every=3, timeout_s=4.0)
_AT_ONCE_S = 60
"""Less than any wait that has no end of its own, and enough for a machine that is busy."""
_MIXED = (["dp4", "tp4", "dp2-tp2", "sdp4"],)
_STAGES = (["dp2", "tp2"], ["sdp2", "dp2"])
_PAIR = (["single", "single"], ["single", "single"])
"""Two stages on two ranks, where more would show no more."""


def _told(job: Job) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(job.folder.failure_file.read_text())
    return told


def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, plan_of(*_PAIR, micro_batches=2), _ENDLESS)
    job.wait_for_step(7)  # the save of step 3 is complete when that of step 6 begins
    job.signal(signal.SIGKILL, 1)
    codes = job.wait(_AT_ONCE_S)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] > 0
    told = _told(job)
    assert told["ranks"] == [1]
    assert told["stage"] == 1
    assert told["step"] >= 7
    assert "rank 1 (stage 1" in told["message"]
    assert f"step {told['step']}" in told["message"]
    assert complete(job.folder.checkpoints)[-1].step >= 3


@pytest.mark.parametrize("rank", [0, longer(2)])
def test_a_stopped_rank_is_found_and_named(tmp_path: Path, rank: int) -> None:
    settings = replace(_ENDLESS, save_every=1000)  # else the others may wait for their files instead
    job = Job(tmp_path, plan_of(*(_STAGES if rank else _PAIR), micro_batches=2), settings)
    job.wait_for_step(2)
    job.signal(signal.SIGSTOP, rank)
    codes = job.wait(_AT_ONCE_S)
    assert codes[rank] == -signal.SIGKILL
    told = _told(job)
    assert told["ranks"] == [rank]
    assert "no sign of life" in told["message"]
    assert "others wait for it in" in told["message"]
    assert RankFailure.exit_status in codes


@pytest.mark.slow
def test_a_rank_that_does_not_come_back_is_told_from_those_that_wait(tmp_path: Path) -> None:
    job = Job(tmp_path, plan_of(*_MIXED), _ENDLESS, fail_at, 1, 3, stall)
    codes = job.wait(60)
    assert 0 not in codes
    told = _told(job)
    assert told["ranks"] == [1]
    assert told["step"] == 3
    assert "not moved on" in told["message"]
    assert "in stall (" in told["message"]


@pytest.mark.slow
def test_a_rank_that_stalls_in_writing_a_checkpoint_is_named_alone(tmp_path: Path) -> None:
    job = Job(tmp_path, plan_of(*_PAIR, micro_batches=2), _ENDLESS, stall_writing, 1, 6)
    assert 0 not in job.wait(60)
    told = _told(job)
    assert told["ranks"] == [1]
    assert "in fsync (injecting.py" in told["message"]
    assert "others wait for it in" in told["message"]
    assert [saved.step for saved in complete(job.folder.checkpoints)] == [3]


def test_sigterm_saves_and_ends_in_order(tmp_path: Path) -> None:
    """All ranks after the same step, whichever of them hear the signal; a second one changes nothing."""
    settings = Settings(steps=100_000)
    job = Job(tmp_path, plan_of(*_PAIR, micro_batches=2), settings)
    job.wait_for_step(3)
    job.signal(signal.SIGTERM, 1)
    time.sleep(0.05)
    job.signal(signal.SIGTERM, 0, 1)
    assert job.wait(_AT_ONCE_S) == [0, 0], job.logs()
    outcome = json.loads(job.folder.outcome_file.read_text())
    assert outcome["stopped"]
    assert [saved.step for saved in complete(job.folder.checkpoints)] == [outcome["step"]]
    assert job.metrics()[-1]["step"] == outcome["step"]


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_stops_all_ranks_before_any_weight_changes(tmp_path: Path) -> None:
    job = Job(tmp_path, plan_of(*_STAGES, micro_batches=2), Settings(steps=6, save_every=1), fail_at, 2, 4, spoil)
    assert job.wait() == [NonFinite.exit_status] * 4, job.logs()
    told = _told(job)
    assert told["step"] == 4
    assert len(told["samples"]) == 8
    assert [line["step"] for line in job.metrics()] == [1, 2, 3]
    assert [saved.step for saved in complete(job.folder.checkpoints)] == [1, 2, 3]
    assert job.logs().count("gradient norm inf") == 1  # said once
    whole = run_to_end(tmp_path / "whole", plan_of(*_STAGES, micro_batches=2), Settings(steps=6))
    again = Job(tmp_path, plan_of(*_STAGES, micro_batches=2), Settings(steps=6, save_every=1))
    assert again.wait() == [0] * 4
    assert again.losses() == whole.losses()  # as if nothing had happened


def test_a_replica_that_differs_stops_all_ranks_before_it_is_saved(tmp_path: Path) -> None:
    settings = Settings(steps=6, save_every=1, compare_every=2)
    job = Job(tmp_path, plan_of(["dp2"] * 4), settings, fail_at, 1, 3, alter)
    assert job.wait() == [Unequal.exit_status] * 2, job.logs()
    message = _told(job)["message"]
    assert message.startswith("step 4: replicas: ranks 0, 1 hold the same part of")
    assert [saved.step for saved in complete(job.folder.checkpoints)] == [1, 2, 3]
    assert job.logs().count("hold the same part of") == 1  # said once


def test_ranks_with_other_labels_stop_before_any_weight_changes(tmp_path: Path) -> None:
    """The first batch is compared as a whole, this one by its labels' mark."""
    job = Job(tmp_path, plan_of(["dp2"] * 4), Settings(steps=6, save_every=1), other_labels, 1, 3)
    assert job.wait() == [Unequal.exit_status] * 2, job.logs()
    message = _told(job)["message"]
    assert message.startswith("step 3: batch: ranks were given batches with different labels")
    assert [saved.step for saved in complete(job.folder.checkpoints)] == [1, 2]
    assert job.logs().count("different labels") == 1  # said once


def test_out_of_memory_says_predicted_and_used_by_stage(tmp_path: Path) -> None:
    job = Job(tmp_path, plan_of(*_PAIR, micro_batches=2), _ENDLESS, fail_at, 1, 3, starve)
    codes = job.wait()
    assert codes[1] == OutOfMemory.exit_status, job.logs()
    assert 0 not in codes
    message = _told(job)["message"]
    assert "rank 1 (stage 1) ran out of memory at step 3" in message
    assert message.count("predicted") == 2
    assert message.count("used") == 2


def test_an_error_of_one_rank_is_what_people_see(tmp_path: Path) -> None:
    job = Job(tmp_path, plan_of(["dp2", "tp2", "sdp2", "tp2"]), _ENDLESS, fail_at, 1, 3, fail)
    codes = job.wait(_AT_ONCE_S)
    assert 0 not in codes
    told = _told(job)
    assert told["ranks"] == [1]
    assert "ZeroDivisionError: on purpose" in told["message"]
    assert job.logs().count("Traceback (most recent call last)") == 1
