"""What the documentation shows of a command's output is what the command prints today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron.cli import app

_DOCS = Path(__file__).parents[2] / "docs"
_runner = CliRunner()


def _said(*arguments: str) -> str:
    done = _runner.invoke(app, [*arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return re.sub(r" +\n", "\n", done.output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documented")


def test_the_tutorials_plan(folder: Path) -> None:
    text = (_DOCS / "tutorial.md").read_text(encoding="utf-8")
    shown = text.partition("```text\n")[2].partition("```")[0]
    assert "samples/s" in shown
    plan = str(folder / "plan.json")
    assert shown in _said("plan", "llama3-8b", "--cluster", "h100-8", "--batch", "128", "--output", plan)
    explained = _said("explain", plan)
    (needs,) = re.findall(r'\("(needs .* more)"\)', text)
    (share,) = re.findall(r"8-way tensor parallelism alone would have (\d+%)", text)
    assert needs in explained
    assert re.search(rf"\ntp .* {share} ", explained)


def test_the_tutorials_cost() -> None:
    (shown,) = re.findall(r"\n +(\S+ tokens take .* in money)\n", (_DOCS / "tutorial.md").read_text(encoding="utf-8"))
    asked = ("--cluster", "h100:2x8", "--batch", "128", "--tokens", "15e9", "--price", "2.5")
    assert shown in _said("plan", "llama3-70b", *asked)


def test_what_another_system_cannot_run(folder: Path) -> None:
    text = (_DOCS / "exchange.md").read_text(encoding="utf-8")
    shown = re.findall(r"\n +(layer \d+ .*|the best plan that torchtitan can run: .*)", text)
    assert len(shown) == 2
    plan = str(folder / "plan64.json")
    _said("plan", "llama3-8b", "--cluster", "h100-8", "--batch", "64", "--output", plan)
    said = _said("export-plan", plan, "--to", "torchtitan")
    assert all(line in said for line in shown)
