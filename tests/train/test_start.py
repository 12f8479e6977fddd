"""``galvatron train`` as people run it: through torchrun's agent, with everything that can be wrong found first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from jobs import plan_of, run_to_end
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from galvatron.core.errors import InvalidInput, RankFailure
from galvatron.core.spec.tuning import Lora
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.setup import Setup, training_of
from galvatron.train import launch, start
from galvatron.train.checkpoints.folder import complete
from galvatron.train.checkpoints.manifest import MANIFEST
from galvatron.train.launch import _ended, _signals_passed_on
from galvatron.train.metrics import read_metrics
from galvatron.train.run_folder import RunFolder
from galvatron.train.settings import Settings
from galvatron.train.start import Asked, Screen, is_plan, replanned

_LIMIT_S = 240.0


def _as_in_the_foreground() -> None:
    """A shell lets what it starts in the background ignore these."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class _Run:
    """The command in a process of its own, or in those that another launcher starts."""

    def __init__(self, *args: str, launcher: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "galvatron", "train", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=_as_in_the_foreground,
        )

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind, whatever went wrong."""
        for pid in [*self.ranks(), self.process.pid] if self.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=_LIMIT_S)  # which a rank that was left would hold up for ever

    def end(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=_LIMIT_S)
        return self.process.returncode, said

    def ranks(self) -> list[int]:
        """Process numbers of the ranks, by rank."""
        found: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/status"):
            try:
                if f"PPid:\t{self.process.pid}\n" in path.read_text():
                    environment = (path.parent / "environ").read_bytes().split(b"\0")
                    rank = next(each for each in environment if each.startswith(b"RANK="))
                    found[int(rank[5:])] = int(path.parent.name)
            except (OSError, StopIteration):
                continue
        return [found[rank] for rank in sorted(found)]

    def wait_for_step(self, folder: RunFolder, step: int) -> None:
        end = time.monotonic() + _LIMIT_S
        while not any(line["step"] >= step for line in read_metrics(folder.metrics_file)):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    plan_of(["dp2", "tp2"], ["sdp2", "dp2"], micro_batches=2).save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


@pytest.mark.slow
def test_after_a_kill_it_starts_again_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    folder, plan = RunFolder(tmp_path / "run"), plan_of(["dp2", "tp2", "sdp2", "dp2"])
    plan.save(tmp_path / "plan.json")
    options = ("--steps", "30", "--save-every", "5", "--seed", "3", "--max-restarts", "1", "--trace", "20")
    with _Run(str(tmp_path / "plan.json"), "--out", str(folder.path), *options) as run:
        run.wait_for_step(folder, 12)
        os.kill(run.ranks()[1], signal.SIGKILL)
        status, said = run.end()
    assert status == 0, said
    assert "rank 1 (stage 0" in said
    assert "starting again from the last checkpoint on 2 devices (0 restarts left)" in said
    assert "predicted and measured" in said
    whole = run_to_end(tmp_path / "whole", plan, Settings(steps=30, seed=3))
    assert _losses(folder) == pytest.approx(whole.losses(), abs=1e-5)  # those ranks have other kernels
    for rank in range(2):
        events = json.loads(folder.trace_file(rank).read_text())["traceEvents"]
        steps = [event for event in events if event.get("name", "").startswith("step ")]
        assert {event["name"] for event in steps} == {"step 20"}
        inside = [event["name"] for event in events if _is_within(event, steps[0])]
        assert any("all_reduce" in name or "allreduce" in name for name in inside)
        assert any("addmm" in name for name in inside)


def _is_within(event: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Whether it began while the other lasted."""
    return "dur" in event and 0 <= event["ts"] - whole["ts"] <= whole["dur"]


@pytest.mark.slow
def test_torchrun_starts_it_again_after_a_kill(tmp_path: Path) -> None:
    """torchrun's own restarts: from the last checkpoint, to the losses of a run that nothing happened to."""
    folder, plan = RunFolder(tmp_path / "run"), plan_of(["dp2", "tp2", "sdp2", "dp2"])
    plan.save(tmp_path / "plan.json")
    options = ("--steps", "30", "--save-every", "5", "--seed", "3")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    with _Run(str(tmp_path / "plan.json"), "--out", str(folder.path), *options, launcher=torchrun) as run:
        run.wait_for_step(folder, 12)
        os.kill(run.ranks()[1], signal.SIGKILL)
        status, said = run.end()
    assert status == 0, said
    assert "rank 1 (stage 0" in said
    assert json.loads(folder.outcome_file.read_text()) == {"step": 30, "stopped": False}
    shown = [
        int(line.split("/")[0].removeprefix("step ")) for line in said.splitlines() if re.match(r"step \d+/", line)
    ]
    again = next(place for place, (before, after) in enumerate(pairwise(shown), 1) if after <= before)
    assert shown == [*range(1, again + 1), *range(shown[again], 31)]
    assert 5 < shown[again] <= again, "it went on from a checkpoint, not from the beginning"
    assert [line["step"] for line in read_metrics(folder.metrics_file)] == [*range(1, 31)]
    whole = run_to_end(tmp_path / "whole", plan, Settings(steps=30, seed=3))
    assert _losses(folder) == pytest.approx(whole.losses(), abs=1e-5)


@pytest.mark.slow
def test_a_run_that_was_killed_equals_one_that_was_not_bit_for_bit(tmp_path: Path, plan_file: str) -> None:
    steps = ("--steps", "30", "--save-every", "5", "--seed", "3")
    killed, whole = RunFolder(tmp_path / "killed"), RunFolder(tmp_path / "whole")
    with _Run(plan_file, "--out", str(whole.path), *steps) as run:
        assert run.end()[0] == 0
    with _Run(plan_file, "--out", str(killed.path), *steps, "--max-restarts", "1") as run:
        run.wait_for_step(killed, 12)
        os.kill(run.ranks()[2], signal.SIGKILL)
        assert run.end()[0] == 0
    assert _losses(killed) == _losses(whole)


def _losses(folder: RunFolder) -> list[float]:
    return [line["loss"] for line in read_metrics(folder.metrics_file)]


@pytest.mark.slow
def test_sigterm_stops_it_in_order_and_fewer_devices_go_on(tmp_path: Path, plan_file: str) -> None:
    folder = RunFolder(tmp_path / "run")
    with _Run(plan_file, "--out", str(folder.path), "--steps", "100000") as run:
        run.wait_for_step(folder, 3)
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
        status, said = run.end()
    assert status == 0, said
    step = complete(folder.checkpoints)[-1].step
    assert f"stopped after step {step}, which is saved" in said
    with _Run("--resume", "--out", str(folder.path), "--devices", "2", "--steps", str(step + 3)) as run:
        status, said = run.end()
    assert status == 0, said
    assert Plan.load(folder.plan_file).cluster.devices == 2
    assert [line["step"] for line in read_metrics(folder.metrics_file)] == [*range(1, step + 4)]
    assert json.loads(folder.outcome_file.read_text()) == {"step": step + 3, "stopped": False}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
@pytest.mark.parametrize("late_s", [0.0, 1.5])
def test_a_signal_while_processes_start_is_no_failure_of_a_rank(
    tmp_path: Path, plan_file: str, number: signal.Signals, late_s: float
) -> None:
    with _Run(plan_file, "--out", str(tmp_path / "run"), "--steps", "3") as run:
        assert run.process.stdout is not None
        while "starting 4 processes" not in run.process.stdout.readline():
            assert run.process.poll() is None
        time.sleep(late_s)
        ranks = run.ranks()
        run.process.send_signal(number)
        status, said = run.end()
    assert status == 128 + number, said
    assert said.splitlines()[-1].startswith(f"error: {number.name} "), said
    assert "Traceback" not in said
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_what_nohup_has_ignored_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with _signals_passed_on():
            os.kill(os.getpid(), number)
        signal.signal(number, signal.SIG_DFL)
        with pytest.raises(SignalException), _signals_passed_on():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_process_that_starts_after_a_request_to_stop_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    children, others = launch._children, set(launch._children())  # ranks of other tests
    monkeypatch.setattr(launch, "_children", lambda: [child for child in children() if child not in others])
    with _signals_passed_on() as request:
        os.kill(os.getpid(), signal.SIGINT)
        with subprocess.Popen(["sleep", "60"]) as child:
            assert child.wait(20) == -signal.SIGTERM
    assert request.number is signal.SIGINT


def test_a_rank_that_the_agent_does_not_know_of_is_ended() -> None:
    """A signal came while it was being started."""
    with subprocess.Popen(["sleep", "60"]) as before:
        with launch._nobody_left(), launch._environment(1):
            late = subprocess.Popen(["sleep", "60"])
        assert before.poll() is None, "it is no rank"
        before.kill()
    assert not Path(f"/proc/{late.pid}").exists()
    late.wait()


def test_a_program_that_is_being_started_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are closed before its environment can be read, which happened once in 300 starts."""
    seen = iter([b"", b"", b"A=1\0B=2\0"])
    monkeypatch.setattr(Path, "read_bytes", lambda _: next(seen))
    assert b"B=2" in launch._environ(1)


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, 2.0, 4.0, None])
def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path, plan_file: str, late_s: float | None) -> None:
    """While they start, and while they train."""
    folder = RunFolder(tmp_path / "run")
    with _Run(plan_file, "--out", str(folder.path), "--steps", "1000000") as run:
        assert run.process.stdout is not None
        while "starting 4 processes" not in run.process.stdout.readline():
            assert run.process.poll() is None
        if late_s is None:
            run.wait_for_step(folder, 3)
        else:
            time.sleep(late_s)
        run.process.kill()
        run.end()  # all of them have closed what they write to


@pytest.mark.parametrize(
    ("asked", "codes", "status", "said"),
    [
        (signal.SIGINT, [-signal.SIGTERM, RankFailure.exit_status], 130, "no step was trained"),
        (None, [-signal.SIGTERM], RankFailure.exit_status, "rank 0 was ended by SIGTERM"),
        (signal.SIGTERM, [2], 2, "rank 0 ended with status 2"),
    ],
)
def test_ranks_that_a_request_ended_are_told_from_ranks_that_failed(
    tmp_path: Path, asked: signal.Signals | None, codes: list[int], status: int, said: str
) -> None:
    failures = {rank: ProcessFailure(rank, 1, code, "none") for rank, code in enumerate(codes)}
    ended = _ended(RunFolder(tmp_path), ChildFailedError("galvatron", failures), asked)
    assert ended.status == status
    assert said in ended.message


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["no-such-model", "--cluster", "cpu-4"], "no-such-model"),
        (["--resume", "--out", "nowhere"], "there is no run in 'nowhere'"),
        (["PLAN", "--devices", "3"], "the plan is for 4"),
        (["bert-tiny", "--cluster", "cpu-4", "--devices", "3"], "cluster 'cpu-4' has 4"),
        (["PLAN", "--data", "no/such/file"], "no/such/file"),
        (["bert-tiny", "--data", "no/such/file"], "no/such/file"),
        (["bert-tiny", "--data", "stories", "--tokenizer", "no/such/folder"], "no/such/folder"),
        (["bert-tiny", "--weights", "no/such/folder"], "no/such/folder"),
        (["bert-tiny", "--weights", "empty"], "empty"),
        (["bert-tiny", "--data", "text.txt"], "no tokenizer was given"),
        (["bert-tiny", "--data", "text.txt", "--tokenizer", "bytes"], "has 10 tokens; one sample takes"),
        (["gpt2-tiny", "--data", "chat.jsonl", "--tokenizer", "bytes"], "need a tokenizer with a folder"),
        (["gpt2-tiny", "--data", "bad.jsonl", "--tokenizer", "bytes"], "bad.jsonl"),
        (["vit-tiny", "--data", "text.txt"], "expected a folder of class folders"),
        (["PLAN", "--decay", "sudden"], "decay: 'sudden'"),
        (["PLAN", "--steps", "0"], "steps: 0"),
        (["PLAN", "--timeout", "soon"], "timeout"),
        ([], "model: none given"),
    ],
)
def test_bad_input_is_said_before_anything_is_measured_or_started(
    args: list[str], named: str, plan_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from galvatron.cli import main
    from galvatron.train import launch

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was launched")

    monkeypatch.setattr(launch, "launch", never)
    monkeypatch.setattr(start, "request_here", never)
    monkeypatch.chdir(Path(plan_file).parent)
    Path("empty").mkdir()
    Path("text.txt").write_text("few words")
    Path("bad.jsonl").write_text('{"text": "fine"}\nnot JSON\n')
    Path("chat.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    monkeypatch.setattr(sys, "argv", ["galvatron", "train", *(plan_file if arg == "PLAN" else arg for arg in args)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ")
    assert named in said
    assert not RunFolder(Path("runs/latest")).plan_file.exists()


def test_a_plan_for_more_gpus_than_there_are(
    tmp_path: Path, plan_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from galvatron.cli import main

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["galvatron", "train", plan_file, "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the plan is for 4, but this machine has 1 GPU; plan anew for that many (--devices 1)" in said
    assert "--virtual 4" in said


def test_a_run_is_not_overwritten(tmp_path: Path, plan_file: str) -> None:
    RunFolder(tmp_path / "run").begin(Plan.load(plan_file), Settings())
    with _Run(plan_file, "--out", str(tmp_path / "run")) as run:
        status, said = run.end()
    assert status == 2
    assert "already holds a run" in said


def test_a_plan_is_told_from_a_models_configuration(tmp_path: Path, plan_file: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert is_plan(plan_file)
    assert not is_plan(str(tmp_path / "config.json"))
    assert not is_plan("bert-base")


@pytest.mark.parametrize("left", [3, 2, 1])
def test_a_plan_for_the_devices_that_are_left(plan_file: str, left: int) -> None:
    """The same model and batch, so that the run goes on as it was."""
    plan = Plan.load(plan_file)
    asked = Asked(source=None, out=Path("run"), settings=Settings(), setup=Setup(), resume=True)
    found = replanned(asked, plan, left)
    assert found.cluster.devices == left
    assert found.batch == plan.batch
    assert found.model == plan.model


@pytest.mark.slow
def test_with_a_device_less_it_plans_anew_and_goes_on(tmp_path: Path, plan_file: str) -> None:
    folder = RunFolder(tmp_path / "run")
    options = ("--steps", "30", "--save-every", "5", "--max-restarts", "1", "--replan")
    with _Run(plan_file, "--out", str(folder.path), *options) as run:
        run.wait_for_step(folder, 12)
        os.kill(run.ranks()[1], signal.SIGKILL)
        status, said = run.end()
    assert status == 0, said
    assert "starting again from the last checkpoint on 3 devices" in said
    assert Plan.load(folder.plan_file).cluster.devices == 3
    lines = read_metrics(folder.metrics_file)
    assert [line["step"] for line in lines] == [*range(1, 31)]
    whole = run_to_end(tmp_path / "whole", Plan.load(plan_file), Settings(steps=30))
    assert [line["loss"] for line in lines] == pytest.approx(whole.losses(), abs=1e-4)


def test_a_finished_run_is_said_to_be_finished_at_once(
    tmp_path: Path, plan_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from galvatron.cli import main

    folder = RunFolder(tmp_path / "run")
    folder.begin(Plan.load(plan_file), Settings(steps=7))
    saved = folder.checkpoints / "step-00000007"
    saved.mkdir(parents=True)
    (saved / MANIFEST).write_text("{}")
    for wanted, finished in (((), True), (("--steps", "8"), False)):
        monkeypatch.setattr(sys, "argv", ["galvatron", "train", "--resume", "--out", str(folder.path), *wanted])
        if not finished:  # it goes on, to what is wrong with this checkpoint
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code
            continue
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert "is finished: all 7 steps are done and saved" in " ".join(capsys.readouterr().out.split())


def test_other_data_are_refused_before_a_resumed_run_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from galvatron.cli import main

    run = run_to_end(tmp_path / "run", plan_of(["dp2"] * 4), Settings(steps=1))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was launched")

    monkeypatch.setattr("galvatron.train.launch.launch", never)
    options = ["--resume", "--out", str(run.folder.path), "--steps", "5", "--seed", "9"]
    monkeypatch.setattr(sys, "argv", ["galvatron", "train", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "resume: the saved run read" in capsys.readouterr().err


def test_a_rank_of_torchrun_goes_on_as_it_is_asked_to(
    tmp_path: Path, plan_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the settings of now, and under the plan that is given."""
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("galvatron.train.worker.train_rank", lambda _: None)

    def started(source: str | None, settings: Settings, *, resume: bool, setup: Setup | None = None) -> None:
        asked = Asked(
            source=source, out=folder.path, settings=settings, setup=setup or {}, resume=resume, config="x = 1"
        )
        start.train(asked, cast("Any", None))

    started(plan_file, Settings(steps=3), resume=False)
    assert folder.config_file.read_text() == "x = 1"
    other = tmp_path / "other.json"
    plan_of(["dp2"], ["dp2"] * 3, micro_batches=2).save(other)
    started(str(other), Settings(steps=6, learning_rate=1e-2), resume=True)
    now, settings = folder.load()
    assert (len(now.stages), settings.steps, settings.learning_rate) == (2, 6, 1e-2)
    with pytest.raises(InvalidInput, match="precision: bf16 given, but the plan is for fp32"):
        started(None, Settings(steps=9), resume=True, setup={"precision": "bf16"})
    assert folder.load()[1].steps == 6
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(InvalidInput, match="already holds a run"):
        started(plan_file, Settings(steps=9), resume=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    started(None, Settings(steps=9), resume=True)
    assert folder.load()[1].steps == 6, "a start after a failure repeats what was asked for first"


def test_adapters_of_a_plan_that_names_them_by_a_pattern(
    tmp_path: Path, plan_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """peft lists the projections; their rank and alpha must be the plan's."""
    plan = Plan.load(plan_file)
    adapted = Lora(rank=4, alpha=8.0)
    training = replace(plan.model.training, lora=adapted)
    planned = replace(plan, model=replace(plan.model, training=training))
    monkeypatch.setattr(start, "_given_plan", lambda _: planned)
    for alpha, taken in ((8.0, True), (32.0, False)):
        content = {"r": 4, "lora_alpha": alpha, "target_modules": ["query", "value"]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(content))
        settings = Settings(adapters=str(tmp_path))
        asked = Asked(source=plan_file, out=tmp_path, settings=settings, setup={})
        lora = training_of(start._with_adapters(asked).setup).lora
        assert lora is not None
        assert lora.asks_for(adapted) == taken


def test_epochs_that_a_run_has_done_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_to_end(tmp_path / "run", plan_of(["dp2"] * 4), Settings(steps=2))
    said: list[str] = []
    screen = Screen(plan=lambda _: None, say=said.append, measuring=cast("Any", None))
    monkeypatch.setattr("galvatron.train.launch.launch", lambda *_: pytest.fail("it was launched"))
    settings = replace(run.folder.load()[1], epochs=1e-9)
    start.train(Asked(source=None, out=run.folder.path, settings=settings, setup={}, resume=True), screen)
    assert "is finished: all 1 steps are done" in said[-1]
    assert run.folder.load()[1].steps == 2
