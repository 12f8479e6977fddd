"""Files and folders that are of another kind, have strange names or hold what nothing real has: one line, and soon."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from longer import longer

from galvatron.cli import main
from galvatron.train.data.opening import check_paths

_NOBODY = 65534
_PLAN = ("plan", "bert-tiny", "--batch", "8", "--cluster", "cpu-4")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The program in this process: status, output, errors. What never ends fails instead."""

    def alarm(*_: object) -> None:
        raise AssertionError("it does not end")

    def command(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["galvatron", *args])
        signal.alarm(60)
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        finally:
            signal.alarm(0)
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    before = signal.signal(signal.SIGALRM, alarm)
    yield command
    signal.signal(signal.SIGALRM, before)


def _refused(told: tuple[int, str, str], said: str) -> None:
    status, _, error = told
    assert status == 2, told
    assert error.startswith("error: ")
    assert error.count("\n") == 1, error
    assert said in error


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("plan.json", ("explain", "FILE")),
        ("c.toml", ("clusters", "FILE")),
        ("m.toml", ("models", "FILE")),
        ("config.json", ("models", "FILE")),
        ("p.toml", (*_PLAN, "--profile", "FILE")),
        ("ds.json", ("price", "bert-base", "--cluster", "a100", "--from", "deepspeed", "FILE")),
        ("r.toml", ("train", "--config", "FILE")),
    ],
)
def test_a_pipe_is_no_file(tmp_path: Path, run: Run, name: str, args: tuple[str, ...]) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / f"linked-{name}").symlink_to("/dev/zero")
    for given in (name, f"linked-{name}"):
        told = run(*(str(tmp_path / given) if each == "FILE" else each for each in args))
        _refused(told, f"{given}: is a pipe or a device, not a file")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("plan.json", (*_PLAN, "--output", "FILE")),
        ("page.html", ("explain", "any.json", "--html", "FILE")),
        ("trace.json", ("explain", "any.json", "--trace", "FILE")),
        ("page.html", ("compare", "bert-base", "--cluster", "a100", "--memory", "8GB", "--html", "FILE")),
    ],
)
def test_a_pipe_is_not_written_to(tmp_path: Path, run: Run, name: str, args: tuple[str, ...]) -> None:
    """Nobody may ever read it."""
    os.mkfifo(tmp_path / name)
    _refused(run(*(str(tmp_path / name) if each == "FILE" else each for each in args)), "is a pipe; expected a file")


def test_an_empty_name_of_a_model(run: Run) -> None:
    _refused(run("plan", "", "--cluster", "a100"), "model: '' given; expected a preset's name")


def test_a_pipe_holds_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "text.txt")
    with pytest.raises(Exception, match="is a pipe or a device; expected a file or a folder"):
        check_paths((str(tmp_path / "text.txt"), None), None)


_DEEP = 100_000


@pytest.mark.parametrize(
    ("name", "content", "args"),
    [
        ("plan.json", "[" * _DEEP, ("explain",)),
        ("plan.json", '{"a":' * _DEEP + "1" + "}" * _DEEP, ("explain",)),
        ("config.json", "[" * _DEEP + "]" * _DEEP, ("models",)),
        ("config.json", '{"model_type": "bert", "a": ' + "[" * _DEEP + "]" * _DEEP + "}", ("models",)),
        ("c.toml", "a = " + "[" * _DEEP + "]" * _DEEP, ("clusters",)),
        ("c.toml", "a = " + "{b = " * _DEEP, ("clusters",)),
        ("m.toml", ".".join(["a"] * _DEEP) + " = 1", ("models",)),
    ],
    ids=range(7),
)
def test_deep_files_are_refused(tmp_path: Path, run: Run, name: str, content: str, args: tuple[str, ...]) -> None:
    (tmp_path / name).write_text(content)
    _refused(run(*args, str(tmp_path / name)), str(tmp_path / name))


@pytest.mark.parametrize(
    "args", [("explain", "NAME"), ("checkpoints", "NAME"), ("export", "NAME", "out"), (*_PLAN, "-o", "NAME")]
)
def test_a_name_of_a_thousand_letters(tmp_path: Path, run: Run, args: tuple[str, ...]) -> None:
    name = str(tmp_path / ("n" * 1000 + ".json"))
    _refused(run(*(name if each == "NAME" else each for each in args)), "too long")


def test_a_name_that_is_not_text(tmp_path: Path, run: Run) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(folder)
    Path(folder, "config.json").write_text(json.dumps({"model_type": "bert", "num_hidden_layers": 2}))
    status, said, error = run("plan", folder, "--cluster", "cpu-4", "--batch", "8", "-o", f"{folder}/plan.json")
    assert (status, error) == (0, "")
    assert "caf\\udce9/plan.json" in said
    assert run("explain", f"{folder}/plan.json")[0] == 0
    _refused(run("explain", f"{folder}/none.json"), "caf\\udce9/none.json: no such file")


def test_a_working_folder_that_was_deleted(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    _refused(run("export", "run", "out"), "the working folder was deleted; go to another one")
    _refused(run("explain", "plan.json"), "plan.json: no such file")
    assert run(*_PLAN)[0] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_folder_without_permission(tmp_path: Path, run: Run) -> None:
    """Effective rights of nobody, in a folder of root's; pytest's own are closed to others as well."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "plan.json").write_text("{}")
    cases = {"plan.json": ("explain", "NAME"), "out.json": (*_PLAN, "-o", "NAME"), "run": ("checkpoints", "NAME")}
    for args in cases.values():
        run(*args)  # as root: everything is imported
    for name, args in cases.items():
        os.seteuid(_NOBODY)
        try:
            told = run(*(str(closed / name) if each == "NAME" else each for each in args))
        finally:
            os.seteuid(0)
        _refused(told, "Permission denied")


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([("a", 5000), ("b", 5000)], "count is 5000; expected less than or equal to 2048"),
        ([("a", 2000), ("b", 2000)], "its counts make 4000 layers; expected at most 2048"),
    ],
)
def test_ten_thousand_layers(tmp_path: Path, run: Run, layers: list[tuple[str, int]], said: str) -> None:
    figures = 'parameters = 1000\nforward_flops = 1e6\nactivation_bytes = "1KiB"\nboundary_bytes = 64\n'
    tables = [f'[[layers]]\nname = "{name}"\ncount = {count}\n{figures}' for name, count in layers]
    (tmp_path / "m.toml").write_text('name = "deep"\n' + "".join(tables))
    status, _, error = run("plan", str(tmp_path / "m.toml"), "--cluster", "cpu-4", "--batch", "8")
    assert status == 2
    assert said in error


@pytest.mark.slow
def test_as_many_layers_as_are_allowed(tmp_path: Path, run: Run) -> None:
    """Two kinds in turn would be refused a plan by memory before they were by number."""
    figures = 'parameters = 1000\nforward_flops = 1e6\nactivation_bytes = "1KiB"\nboundary_bytes = 64\n'
    tables = [f'[[layers]]\nname = "{name}"\ncount = 1024\n{figures}' for name in "ab"]
    (tmp_path / "m.toml").write_text('name = "deep"\n' + "".join(tables))
    assert run("plan", str(tmp_path / "m.toml"), "--cluster", "cpu-4", "--batch", "8", "--pipeline", "1")[0] == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--sequence-length", "1000000000000"), "sequence_length is 1000000000000; expected a whole number from 1 to"),
        (("--sequence-length", "0"), "sequence_length is 0; expected a whole number from 1"),
        (("--memory", "1e30GB"), "memory"),
        (("--batch", "1" * 30), "batch"),
        (("--lora", "1" * 30), "lora"),
        (("--max-micro-batches", "-3"), "max-micro-batches"),
    ],
)
def test_options_out_of_range(run: Run, args: tuple[str, str], said: str) -> None:
    _refused(run("plan", "bert-tiny", "--cluster", "cpu-4", *args), said)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", longer("vocab_size")])
@pytest.mark.parametrize("value", [2**32, 2**60, 10**30])
def test_a_configuration_of_figures_that_nothing_has(tmp_path: Path, run: Run, field: str, value: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", field: value}))
    status, said, error = run("plan", str(tmp_path / "config.json"), "--cluster", "titan-rtx-8", "--batch", "8")
    assert status in (2, 3), (said, error)
    assert error.startswith("error: ")


def test_too_many_layers_of_a_model_of_unknown_family(tmp_path: Path, run: Run) -> None:
    """They would be built one by one."""
    content = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 100_000}
    (tmp_path / "config.json").write_text(json.dumps(content))
    told = run("plan", str(tmp_path / "config.json"), "--cluster", "titan-rtx-8", "--batch", "8")
    _refused(told, "num_hidden_layers of its configuration is 100,000; expected at most 2,048")


def test_square_brackets_in_a_name_are_no_markup(tmp_path: Path, run: Run) -> None:
    name = str(tmp_path / "plan[v2].json")
    assert f"written to {name}" in run(*_PLAN, "-o", name)[1]
    assert Path(name).is_file()
