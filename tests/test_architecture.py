"""The import direction of docs/architecture.md holds, and the planner never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import galvatron

PACKAGE = Path(galvatron.__file__).parent
LAYERS = [
    "errors", "units", "environment", "heap", "pacing", "virtual", "spec", "space", "cost", "search", "zoo", "plans",
    "models", "runtime", "rehearsal", "profiler", "data", "checkpoints", "train", "api", "cli",
]  # fmt: skip
"""A module imports only from layers before its own (or its own)."""


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _layer(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Layers of the package that a module imports, wherever in its text (lazy imports count as well)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("galvatron."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "galvatron":
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("galvatron."))
    return found


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    layer = _layer(path)
    if layer in ("__init__", "__main__"):  # the front doors may name anything
        return
    assert layer in LAYERS, f"{path.name} is in no layer of the architecture"
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    assert _imports(path) <= allowed, f"{layer} may import {sorted(allowed)}"


def test_planning_imports_no_torch() -> None:
    """A whole plan through the public API, in a process that then looks at what was imported."""
    script = (
        "import sys, galvatron\n"
        "plan = galvatron.plan('bert-tiny', 'titan-rtx-8', memory='8GiB', batch=8)\n"
        "assert plan.certificate.gap == 0\n"
        "heavy = {'torch', 'transformers', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_file_is_long() -> None:
    """Small files: none reaches 400 lines."""
    long = {
        str(path.relative_to(PACKAGE)): count
        for path in _modules()
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert not long
