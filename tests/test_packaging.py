"""What is installed is what the code needs, and what is built can be installed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import galvatron

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAMES = {"PIL": "pillow", "pydantic_core": "pydantic"}
"""Modules whose package has another name, or comes with another package."""


def declared() -> set[str]:
    extras = [
        each
        for name, extra in PROJECT["optional-dependencies"].items()
        if name not in ("dev", "docs")
        for each in extra
    ]
    return {re.split(r"[<>=\[ ]", each)[0].lower() for each in [*PROJECT["dependencies"], *extras]}


def imported() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in modules:
                found.setdefault(module.split(".")[0], file)
    return {name: file for name, file in found.items() if name not in {*sys.stdlib_module_names, "galvatron"}}


def test_every_import_is_a_declared_dependency() -> None:
    for module, file in imported().items():
        package = NAMES.get(module, module).lower()
        assert package in declared(), f"{file} imports {module}, which pyproject.toml does not declare"


def test_every_declared_dependency_is_imported() -> None:
    used = {NAMES.get(module, module).lower() for module in imported()}
    by_name = {"datasets", "tensorboard", "galvatron"}  # imported by their name in a string, or through torch
    assert declared() <= used | by_name


def test_the_version_is_said_once() -> None:
    assert PROJECT["version"] == galvatron.__version__
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel and an sdist, built from a copy, since building writes into the tree."""
    folder = tmp_path_factory.mktemp("built")
    skipped = shutil.ignore_patterns(".*", "build", "runs", "results", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=skipped)
    program = (
        "from setuptools import build_meta\n"
        f"build_meta.build_wheel({str(folder)!r})\nbuild_meta.build_sdist({str(folder)!r})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=folder / "source", capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.slow
def test_the_source_distribution_has_docs_examples_and_tests(built: Path) -> None:
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for expected in (
        "docs/training.md",
        "examples/finetune_vit.py",
        "tests/test_packaging.py",
        "CHANGELOG.md",
        "Makefile",
    ):
        assert expected in names


@pytest.mark.slow
def test_the_wheel_plans_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment, found through a path file; galvatron itself is the wheel's."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "galvatron/py.typed" in names
    assert any(name.endswith("presets/clusters/a100.toml") for name in names)
    assert not any(name.startswith("tests") for name in names)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", "--no-index", "-q", wheel], check=True, env=environment
    )
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = subprocess.run(
        [python, "-c", "import galvatron; print(galvatron.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    assert str(site) in where.stdout
    command = [str(tmp_path / "venv" / "bin" / "galvatron"), "plan", "bert-large", "-c", "rtx4090:8", "-o", "p.json"]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True)
    assert (tmp_path / "p.json").stat().st_size > 1000
