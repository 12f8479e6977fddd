"""The import direction of docs/architecture.md holds, without a cycle, and the planner never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import galvatron

PACKAGE = Path(galvatron.__file__).parent
LAYERS = [
    "core.errors", "core.units", "core.spec", "core.files", "families", "planner.space", "planner.cost",
    "planner.search", "planner.plan", "planner.exchange", "planner.pages", "processes", "runtime", "measure",
    "train.data", "train.checkpoints", "train", "api", "studio", "cli",
]  # fmt: skip
"""A module imports only from layers before its own (or its own)."""
NO_TORCH = ["core", "planner", "studio", "cli"]
"""Folders that import torch nowhere themselves, not even late or for types."""


@cache
def _modules() -> dict[str, Path]:
    """Every module by its name after ``galvatron.``; the package itself is ``""``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(_modules()[name].read_text(encoding="utf-8"))


@cache
def _imports(name: str) -> set[str]:
    """Modules of the package that a module imports, wherever in its text: lazy and type-only imports count as well."""
    found = set()
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "galvatron":
            base = node.module.removeprefix("galvatron").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                found.add(inner if inner in _modules() else base)
        elif isinstance(node, ast.Import):
            found.update(
                alias.name.removeprefix("galvatron.") for alias in node.names if alias.name.startswith("galvatron.")
            )
    return found - {name}


def _layer(name: str) -> int | None:
    inside = [layer for layer in LAYERS if name == layer or name.startswith(f"{layer}.")]
    return LAYERS.index(max(inside, key=len)) if inside else None


def test_imports_point_one_way() -> None:
    wrong = []
    for name in _modules().keys() - {"", "__main__"}:
        own = _layer(name)
        if own is None:  # a folder of layers, which imports nothing itself
            wrong += [f"{name} is in no layer of the architecture"] if _imports(name) else []
            continue
        upwards = sorted(other for other in _imports(name) if (_layer(other) or 0) > own)
        wrong += [f"{name} imports {upwards}, which {LAYERS[own]} may not"] if upwards else []
    assert not wrong


def test_there_is_no_cycle() -> None:
    """Neither among plain imports nor through late or type-only ones. The package's own front door names everything."""
    graph = {name: _imports(name) - {""} for name in _modules() if name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules that import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    "script",
    [
        "import galvatron",
        "import galvatron.families, galvatron.cli, galvatron.measure.clusters, galvatron.measure.layers",
        "import galvatron\n"
        "plan = galvatron.plan('bert-tiny', 'titan-rtx-8', memory='8GiB', batch=8)\n"
        "assert plan.certificate.gap == 0",
    ],
)
def test_planning_imports_no_torch(script: str) -> None:
    """The package, its front doors, a whole plan: each in a process that then looks at what was imported."""
    script = (
        f"import sys\n{script}\n"
        "heavy = {'torch', 'transformers', 'scipy', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_planner_names_no_torch() -> None:
    for name in _modules():
        if name.split(".")[0] in NO_TORCH:
            heavy = {"torch", "transformers"} & _outside(name)
            assert not heavy, f"{name} imports {heavy}"


def _outside(name: str) -> set[str]:
    found = set()
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
    return found


def test_functions_take_few_parameters() -> None:
    """At most six, but where a command line's options are declared."""
    many = [
        f"{name}.{node.name}"
        for name in _modules()
        if name.split(".")[0] != "cli"
        for node in ast.walk(_tree(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _parameters(node) > 6
    ]
    assert not many


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([own for own in given if own.arg not in ("self", "cls")])


def test_public_names_are_documented() -> None:
    """Every module, and every class and function that it exports, says what it is for."""
    silent = []
    for name in _modules():
        tree = _tree(name)
        exported = {
            text
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for text in ast.literal_eval(node.value)
        }
        nodes = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        silent += [f"{name}.{node.name}" for node in nodes if node.name in exported and not ast.get_docstring(node)]
        silent += [] if ast.get_docstring(tree) else [name]
    assert not silent


def test_files_of_tests_have_names_of_their_own() -> None:
    """Folders of tests are no packages: of two files with one name mypy would check neither."""
    files = [path.name for path in Path(__file__).parent.rglob("*.py")]
    assert sorted(set(files)) == sorted(files)


def test_no_file_is_long() -> None:
    """Small files: none has more than 400 lines."""
    long = {name: count for name, path in _modules().items() if (count := len(path.read_text().splitlines())) > 400}
    assert not long
