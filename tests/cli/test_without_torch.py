"""Verbs that need PyTorch say how to install it, where it is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import sys
import importlib.machinery
found = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None
    if name.partition(".")[0] in ("torch", "transformers")
    else found(name, path, target)
)
from galvatron.cli import main
sys.argv = ["galvatron", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    "verb",
    [
        ["train", "bert-tiny"],
        ["rehearse", "plan.json"],
        ["profile", "cluster"],
        ["profile", "model", "bert-tiny"],
        ["check", "bert-tiny"],
        ["export", "run", "out"],
        ["plan", "bert-tiny", "--cluster", "auto"],
    ],
)
def test_the_command_that_installs_it_is_named(verb: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *verb], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, "no traceback"
    assert done.stderr.startswith("error: ")
    assert "pip install 'galvatron[torch]'" in done.stderr
