"""What people expect of a command line: short names, a version, a file of options, a look at the machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import galvatron
from galvatron.cli import app
from galvatron.cli.config import Config, config_text, said_here
from galvatron.core.errors import InvalidInput
from galvatron.measure import doctor

runner = CliRunner()
VERBS = (
    "plan",
    "train",
    "explain",
    "compare",
    "check",
    "rehearse",
    "checkpoints",
    "export",
    "strategies",
    "doctor",
    "studio",
)


def test_version_and_short_help() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == f"galvatron {galvatron.__version__}"
    for verb in (*VERBS, "models", "clusters", "profile"):
        short, long = (runner.invoke(app, [verb, name], env={"COLUMNS": "80"}) for name in ("-h", "--help"))
        assert short.exit_code == 0
        assert short.output == long.output
        assert all(len(line) <= 80 for line in short.output.splitlines()), verb


def test_help_has_panels_and_examples() -> None:
    shown = runner.invoke(app, ["train", "-h"], env={"COLUMNS": "100"}).output
    for panel in ("Devices", "Batch", "Model", "Data", "Learning", "Faults", "Saving and logging"):
        assert f"─ {panel} ─" in shown
    assert "galvatron train --resume" in shown
    assert "Treat a rank as hung after this long without a heartbeat" in shown
    assert re.search(r"--out\b(?!put)", shown) is None, "the old name still works, and is not shown"


def test_completion_is_offered() -> None:
    assert "--install-completion" in runner.invoke(app, ["-h"], env={"COLUMNS": "100"}).output


def _options(*arguments: str) -> dict[str, Any]:
    """What a command with a few kinds of options is given, by a file and by the command line."""
    seen: dict[str, Any] = {}
    small = typer.Typer()

    @small.command()
    def command(
        context: typer.Context,
        model: str | None = typer.Argument(None),
        config: Config = None,
        steps: int = 100,
        rate: float | None = None,
        pack: bool = False,
        data: str | None = None,
    ) -> None:
        seen.update(model=model, steps=steps, rate=rate, pack=pack, data=data)
        seen["text"] = config_text(said_here(context))

    result = runner.invoke(small, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen


def test_options_come_from_a_file_and_the_command_line_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "bert-tiny"\nsteps = 7\nrate = 1e-3\npack = true\ndata = "a \\"b\\" [c]"\n')
    said = _options("--config", str(file))
    assert (said["model"], said["steps"], said["rate"], said["pack"]) == ("bert-tiny", 7, 1e-3, True)
    assert _options("--config", str(file), "--steps", "9")["steps"] == 9
    again = tmp_path / "again.toml"
    again.write_text(said["text"])
    assert _options("--config", str(again)) == said, "what is written reads back equal"
    assert "steps" not in _options("bert-tiny")["text"], "a default is not said"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stps = 3", "stps is not an option of this command; did you mean 'steps'?"),
        ('steps = "many"', "steps is 'many'; expected a whole number"),
        ("steps = true", "expected a whole number"),
        ('pack = "yes"', "expected true or false"),
        ("rate = [1]", "expected a number"),
        ("data = {}", "expected text"),
        ("steps = ", "run.toml"),
        ('config = "other.toml"', "config is not an option"),
    ],
)
def test_a_wrong_file_of_options_is_refused(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(line)
    with pytest.raises(InvalidInput, match=re.escape(said)):
        _options("--config", str(file))


def test_a_missing_file_of_options_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["galvatron", "train", "--config", "nowhere.toml"])
    with pytest.raises(SystemExit) as stop:
        galvatron.cli.main()
    assert stop.value.code == 2
    assert "nowhere.toml" in capsys.readouterr().err


def test_names_of_the_trainer_and_of_torchrun_are_the_same_options() -> None:
    shown = runner.invoke(app, ["train", "-h"], env={"COLUMNS": "120"}).output
    for ours, theirs in (("steps", "max-steps"), ("clip", "max-grad-norm"), ("save-every", "save-steps")):
        assert f"--{ours},--{theirs}" in shown
    assert "--nproc-per-node" in shown


def test_the_doctor_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("torch", "transformers") else "1")
    monkeypatch.setattr(doctor, "_LEAST_DISK", 2**60)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    found = {finding.what: finding for finding in doctor.examine(tmp_path)}
    assert found["torch"].state is doctor.State.FAIL
    assert "galvatron[torch]" in found["torch"].remedy
    assert found["disk"].state is doctor.State.WARN
    assert found["compiler"].state is doctor.State.WARN
    assert doctor.State.FAIL in {one.state for one in doctor.examine(tmp_path / "nowhere") if one.what == "disk"}


def test_a_torch_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_ASK_TORCH", "raise ImportError('libcudart.so: not found')")
    (finding,) = [one for one in doctor.examine(tmp_path) if one.what == "torch"]
    assert finding.state is doctor.State.FAIL
    assert "libcudart.so" in finding.found


def test_the_doctor_looks_at_everything_and_needs_no_torch_in_its_own_process() -> None:
    program = (
        "import sys; from galvatron.cli import app\n"
        "try: app(['doctor', '--json'], prog_name='galvatron')\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "False"
    found = {entry["what"]: entry for entry in json.loads(ran.stdout)}
    assert {"python", "torch", "gpus", "compiler", "disk", "ports", "open files"} <= set(found)
    assert {entry["state"] for entry in found.values()} <= {"ok", "warn", "fail"}
    assert found["torch"]["state"] == "ok"
    assert found["python"]["found"].startswith(".".join(map(str, sys.version_info[:2])))
    assert all(entry["remedy"] for entry in found.values() if entry["state"] != "ok")
