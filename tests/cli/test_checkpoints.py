"""``galvatron checkpoints`` and ``galvatron export`` as a person and as a script use them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from ranks import ranks

import galvatron
from galvatron import cli
from galvatron.core.spec import Training
from galvatron.families import load_cluster
from galvatron.families.bert.facts import Bert
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


Run = Callable[..., Done]


def _save(folder: Path) -> None:
    """On a rank: two steps, without a warning of anything."""
    model_spec = Bert(hidden=32, layers=1, heads=2, inner=64, vocabulary=64, positions=16)
    spec = model_spec.spec("tiny", Training(dropout=False))
    cluster = replace(load_cluster("titan-rtx-8"), name="one", levels=())
    plan = priced(Request(model=spec, cluster=cluster, batch=4), [["single"] * 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = galvatron.parallelize(None, plan, device="cpu")
        optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
        checkpoints = galvatron.Checkpoints(folder)
        for step in (5, 10):
            checkpoints.save(model, optimizer, {"sample": step}, step=step)
        checkpoints.finish()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["galvatron", *arguments])
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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two steps, saved on one rank."""
    folder = tmp_path_factory.mktemp("run")
    ranks(1).run(_save, folder / "checkpoints")
    return folder


def test_steps_are_listed(run: Run, saved: Path) -> None:
    (saved / "checkpoints" / "step-00000011.partial").mkdir(exist_ok=True)
    listed = json.loads(run("checkpoints", str(saved), "--verify", "--json").out)
    assert [(each["step"], each["state"]) for each in listed] == [
        (5, "verified"),
        (10, "verified"),
        (None, "partial"),
    ]
    assert all(each["bytes"] > 10_000 for each in listed[:2])
    text = run("checkpoints", str(saved / "checkpoints")).out
    assert "step-00000010" in text
    assert "complete" in text


def test_the_newest_step_is_exported(run: Run, saved: Path, tmp_path: Path) -> None:
    done = run("export", str(saved), str(tmp_path / "out"))
    assert done.status == 0, done.err
    assert "step 10" in done.out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    again = run("export", str(saved / "checkpoints" / "step-00000005"), str(tmp_path / "out"))
    assert (again.status, "not empty" in again.err) == (2, True)


def test_damage_has_its_own_status(run: Run, saved: Path) -> None:
    path = saved / "checkpoints" / "step-00000005" / "rank-00000.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)
    done = run("checkpoints", str(saved), "--verify")
    assert done.status == 4
    assert "damaged" in done.out
    assert str(path) in done.err
    assert run("checkpoints", str(saved)).status == 0, "without --verify only the manifests are read"


@pytest.mark.parametrize("verb", [("checkpoints", "nowhere"), ("export", "nowhere", "out")])
def test_no_such_folder(run: Run, verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*verb)
    assert done.status == 2
    assert "nowhere" in done.err
