"""``galvatron rehearse`` as a person and as a script use it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

import galvatron
from galvatron import cli
from galvatron.core.spec import ONE_F_ONE_B, Training
from galvatron.families import load_cluster
from galvatron.families.bert.facts import Bert
from galvatron.measure.rehearsal.results import Measured, Rehearsal, rehearsal_view
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request

MODEL = Bert(hidden=32, layers=2, heads=2, inner=64, vocabulary=64, positions=16)


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["galvatron", "rehearse", *arguments])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return Done(status, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def plan() -> galvatron.Plan:
    """Two stages of four devices."""
    request = Request(
        model=MODEL.spec("tiny", Training(dropout=False)),
        cluster=load_cluster("titan-rtx-8"),
        batch=16,
        schedule=ONE_F_ONE_B,
    )
    return priced(request, [["dp4", "sdp4"], ["dp2-tp2", "dp2-tp2"]], micro_batches=2)


@pytest.fixture
def saved(plan: galvatron.Plan, tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    plan.save(path)
    return str(path)


@pytest.mark.slow
def test_every_stage_is_measured_beside_its_prediction(run: Run, saved: str, plan: galvatron.Plan) -> None:
    done = run(saved, "--all-stages", "--device", "cpu", "--steps", "1", "--json")
    assert done.status == 0, done.err
    first, second = json.loads(done.out)
    assert [(each["rank"], each["stage"], each["device"]) for each in (first, second)] == [(0, 0, "cpu"), (4, 1, "cpu")]
    for each, stage in zip((first, second), plan.stages, strict=True):
        predicted, measured = each["predicted"], each["measured"]
        assert predicted["peak_bytes"] == stage.memory_bytes - stage.memory.reserved
        assert predicted["compute_s"] == pytest.approx(2 * stage.time.compute_s)
        assert each["memory_ratio"] == pytest.approx(predicted["peak_bytes"] / measured["peak_bytes"])
        assert measured["peak_bytes"] == max(measured["forward_backward_bytes"], measured["optimizer_bytes"])
        assert measured["state_bytes"] == pytest.approx(stage.memory.states, rel=0.15)  # toys have many buffers
        assert measured["reserved_bytes"] is None
        assert measured["compute_s"] > 0 < measured["optimizer_s"]


def test_what_the_process_of_a_rank_refuses_is_said_as_everywhere(
    run: Run, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime finds, say, that the configuration builds another model than the plan's layers."""

    def refuse(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        Path(command[-1]).write_bytes(pickle.dumps(galvatron.PlanMismatch("model: it has 5 layers; plan again")))
        return subprocess.CompletedProcess(command, returncode=0, stdout=b"", stderr=b"")

    monkeypatch.setattr("subprocess.run", refuse)
    done = run(saved, "--device", "cpu")
    assert (done.status, done.err) == (2, "error: model: it has 5 layers; plan again\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rank", "8"), "rank: 8 given; the plan has ranks 0 to 7"),
        (("--rank", "-1"), "rank: -1 given"),
        (("--rank", "1", "--all-stages"), "give one of the two"),
        (("--steps", "0"), "steps: 0 given; expected at least 1"),
        (("--device", "tpu"), "device: 'tpu' given; expected one of cpu, cuda"),
        (("--device", "cuda"), "device: 'cuda' given, but PyTorch sees no GPU here; use 'cpu'"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    run: Run, saved: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("subprocess.run", _no_process)
    done = run(saved, *arguments)
    assert done.status == 2
    assert said in done.err


def test_plans_that_cannot_be_read_or_run(run: Run, plan: galvatron.Plan, tmp_path: Path) -> None:
    assert run(str(tmp_path / "none.json")).status == 2
    (tmp_path / "text.json").write_text("a plan")
    assert run(str(tmp_path / "text.json")).status == 2
    replace(plan, model=replace(plan.model, config=None)).save(tmp_path / "figures.json")
    done = run(str(tmp_path / "figures.json"), "--device", "cpu")
    assert done.status == 2
    assert "model.config: null" in done.err
    assert "plan a model from a preset" in done.err


def test_a_process_that_dies_is_reported_with_its_last_words(
    run: Run, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = subprocess.CompletedProcess([], returncode=1, stdout=b"", stderr=b"Traceback\nOutOfMemoryError: 7 GiB\n")
    monkeypatch.setattr("subprocess.run", lambda *args, **options: died)
    done = run(saved, "--device", "cpu")
    assert done.status == 1
    assert done.err == "error: rank 0: its process ended with status 1 on cpu: OutOfMemoryError: 7 GiB\n"


def test_people_see_both_figures_and_what_they_mean(plan: galvatron.Plan) -> None:
    measured = Measured(
        state_bytes=2**20,
        forward_backward_bytes=2 * plan.stages[0].memory_bytes,
        optimizer_bytes=0,
        reserved_bytes=3 * 2**30,
        least_bytes=4 * plan.stages[0].memory_bytes,
        compute_s=0.25,
        optimizer_s=0.002,
    )
    console = Console(width=140, no_color=True)
    with console.capture() as captured:
        console.print(rehearsal_view(plan, [Rehearsal.of(plan, 0, "cuda", measured)]))
    text = captured.get()
    for part in (
        "rank 0 of 8, alone on cuda",
        "250 ms",
        "2.00 ms",
        "TITAN RTX",
        "at most 3.00 GiB",
        "50.0% of it between tensors",
    ):
        assert part in text
    assert f"{Rehearsal.of(plan, 0, 'cuda', measured).memory_ratio - 1:+.1%}" in text


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys\nfrom galvatron import cli\nsys.argv = ['galvatron', 'rehearse', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "--all-stages" in done.stdout


def _no_process(*args: object, **options: object) -> None:
    raise AssertionError("a process was started")
