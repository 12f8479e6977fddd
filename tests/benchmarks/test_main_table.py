"""The main table in small: ranks that fail, cells that run out of memory, runs that go on where others stopped."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from fork_server_jobs import OneRankFails, TellRank

import fresh_ranks
import main_table
from cells import Cell, Run, append, read_runs, settled
from fork_server import ForkServer, run_ranks
from rank_job import prepare

CPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(prepare) as started:
        yield started


class _Shared:
    """A fork_server that outlives whoever uses it."""

    def __init__(self, fork_server: ForkServer | _Never) -> None:
        self.run = fork_server.run

    def __enter__(self) -> _Shared:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _table(
    fork_server: ForkServer | _Never, monkeypatch: pytest.MonkeyPatch, results: Path, *arguments: str
) -> list[Run]:
    monkeypatch.setattr(fresh_ranks, "ForkServer", lambda prepare: _Shared(fork_server))
    main_table.main(["--tiny", "--results", str(results), *arguments])
    return read_runs(results)


@pytest.mark.slow
def test_each_run_has_fresh_ranks(fork_server: ForkServer) -> None:
    for _ in range(2):
        outcome = fork_server.run(TellRank(), 3, CPU, 60)
        assert (outcome.status, outcome.results) == ("ok", tuple((rank, 3, True) for rank in range(3)))


@pytest.mark.slow
def test_ranks_can_be_started_without_forking() -> None:
    outcome = run_ranks(TellRank(), 2, CPU, 100, multiprocessing.get_context("spawn"))
    assert (outcome.status, outcome.results) == ("ok", ((0, 2, True), (1, 2, True)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "status", "said"),
    [
        ("memory", "oom", "rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("error", "failed", "rank 1: ValueError: no such thing (in run, fork_server_jobs.py line"),
        ("death", "failed", "rank 1: ended without a word"),
        ("silence", "failed", "not done after 3 s"),
    ],
)
def test_one_lost_rank_ends_the_run(fork_server: ForkServer, way: str, status: str, said: str) -> None:
    started = time.monotonic()
    outcome = fork_server.run(OneRankFails(way), 3, CPU, 3 if way == "silence" else 120)
    assert outcome.status == status
    assert outcome.message.startswith(said)
    assert time.monotonic() - started < 60  # nobody waited for what never comes
    assert fork_server.run(TellRank(), 2, CPU, 60).status == "ok"  # and the next run is none the worse


def _run(status: str, batch: int) -> Run:
    return Run(
        model="m", budget="8GB", system="dp", program="stock", batch=batch, micro_batches=1, schedule="gpipe",
        said_to_fit=True, predicted_s=1.0, predicted_without_slowdown_s=1.0, predicted_bytes=1, reserved_bytes=0,
        status=status,
    )  # fmt: skip


@pytest.mark.slow
def test_out_of_memory(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    _table(fork_server, monkeypatch, results, "--models", "bert-huge-32", "--budgets", "4MB", "--systems", "dp")
    runs = _table(
        fork_server, monkeypatch, results, "--models", "bert-huge-32", "--budgets", "8MB", "--systems", "galvatron"
    )
    # What is said not to fit is run all the same. The planner's figures are rough for tiny models: the batch that it
    # says fits does not, nor does the next smaller one.
    assert [(run.system, run.batch, run.status, run.said_to_fit) for run in runs] == [
        ("dp", 8, "oom", False),
        ("galvatron", 16, "oom", True),
        ("galvatron", 8, "oom", True),
    ]
    assert runs[0].predicted_bytes > 4_000_000
    assert all(int(run.message.split("out of memory: ")[1].split()[0]) > 8_000_000 for run in runs)


@pytest.mark.slow
def test_goes_on_where_it_stopped(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    cells = ["--models", "bert-huge-32", "--budgets", "11MB", "--systems", "sdp,3d"]
    append(results, replace(_run("oom", 16), model="bert-huge-32", budget="11MB", system="sdp"))
    runs = _table(fork_server, monkeypatch, results, *cells)
    assert [(run.system, run.batch, run.status, run.program) for run in runs[1:]] == [
        ("sdp", 8, "ok", "stock"),
        ("3d", 16, "oom", "galvatron"),  # masks of dropout are wider on CPUs than on the GPUs that the planner counts
        ("3d", 8, "ok", "galvatron"),
    ]
    assert runs[3].predicted_without_slowdown_s == runs[3].predicted_s  # TP and PP: nothing overlaps
    for run in (runs[1], runs[3]):
        assert len(run.iterations_s) == 3
        assert len(run.peak_bytes) == 4
        assert 1_000_000 < max(run.peak_bytes) <= 11_000_000
    assert runs[1].predicted_without_slowdown_s < runs[1].predicted_s
    written = json.loads(results.read_text().splitlines()[1])
    assert written["samples_per_s"] == pytest.approx(8 / sorted(written["iterations_s"])[1], rel=1e-3)
    content = results.read_text()
    _table(fork_server, monkeypatch, results, *cells)
    assert results.read_text() == content
    *before, again = _table(fork_server, monkeypatch, results, *cells, "--systems", "sdp", "--repeat")
    assert before == runs
    assert (again.cell, again.batch, again.peak_bytes) == (runs[1].cell, runs[1].batch, runs[1].peak_bytes)
    assert again.iterations_s[:3] == runs[1].iterations_s
    assert len(again.iterations_s) == 6


class _Never:
    """A fork_server that nobody may ask for ranks."""

    def run(self, *_: object) -> NoReturn:
        pytest.fail("ranks were started")


def test_no_time_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = _table(_Never(), monkeypatch, tmp_path / "r.jsonl", "--models", "bert-huge-32", "--seconds", "5")
    assert runs == []


def test_a_plan_that_two_systems_share_is_run_once() -> None:
    facts = {"cluster": "c", "profile": None, "boot": "b"}
    done = replace(_run("ok", 16), program="galvatron", system="galvatron", plan=("encoder×2 dp4",), facts=facts)
    asked = replace(done, system="dp+tp", status="failed", said_to_fit=False)
    assert main_table._twin(asked, [done]) is done
    others = [
        replace(done, plan=("encoder×2 tp4",)),
        replace(done, batch=24),
        replace(done, budget="12GB"),
        replace(done, facts={**facts, "boot": "another"}),
        replace(done, facts={**facts, "cluster": "another"}),
        replace(done, status="failed"),
    ]
    assert main_table._twin(asked, others) is None
    assert main_table._twin(replace(asked, program="stock"), [replace(done, program="stock")]) is None


@pytest.mark.parametrize(
    ("runs", "done"),
    [
        ([], False),
        ([("ok", 16)], True),
        ([("oom", 16)], False),
        ([("oom", 16), ("oom", 8)], True),
        ([("failed", 16)], False),
        ([("failed", 16), ("failed", 16)], True),
        ([("failed", 16), ("ok", 16)], True),
    ],
)
def test_when_a_cell_is_settled(runs: list[tuple[str, int]], done: bool) -> None:
    assert settled(Cell(model="m", budget="8GB", system="dp"), [_run(*run) for run in runs]) is done
