"""A family is its folder: nothing else names it, and a new folder is all that a new family takes."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import galvatron
from galvatron.core.spec.model import Training
from galvatron.families.discovery import families
from galvatron.families.family import Family
from galvatron.families.presets import preset_names

PACKAGE = Path(galvatron.__file__).parent
FOLDERS = ["bert", "gpt2", "llama", "t5", "vit", "swin"]


def test_all_folders_are_found_in_order() -> None:
    assert list(families()) == FOLDERS


def _named_presets(family: Family) -> list[str]:
    return [*family.by_depth, *family.paper, *family.known, *family.tiny]


def test_no_two_families_claim_the_same() -> None:
    every = list(families().values())
    claims = Counter(claim for family in every for claim in (family.model_type, family.head_class))
    # A set, because a family may have a name both with and without a depth ("t5-large-32", "t5-large").
    claims.update(f"preset {name}" for family in every for name in set(_named_presets(family)))
    assert claims.most_common(1)[0][1] == 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_preset_is_of_the_declared_type_and_class(folder: str) -> None:
    family = families()[folder]
    makers = [make(32) for make in family.by_depth.values()]
    for architecture in [*makers, *family.paper.values(), *family.known.values(), *family.tiny.values()]:
        spec = architecture.spec("some", Training())
        assert spec.family == folder
        assert spec.config is not None
        assert spec.config["model_type"] == family.model_type
        assert spec.config["architectures"] == [family.head_class]


def _names(path: Path) -> Iterator[str]:
    """Modules that a file imports from, and its string literals; not what its docstrings say."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_nothing_outside_a_folder_names_its_family() -> None:
    own = {}
    for folder, family in families().items():
        modules = {f"galvatron.families.{folder}{module}" for module in ("", ".facts", ".adapter")}
        own[folder] = modules | {family.model_type, family.head_class, *_named_presets(family)}
    for path in PACKAGE.rglob("*.py"):
        names = set(_names(path))
        for folder, of_family in own.items():
            if path.parent != PACKAGE / "families" / folder:
                assert not of_family & names, f"{path} names the family {folder}"


SCRIPT = """
import json, sys
import galvatron
from galvatron.families import model_names
assert galvatron.__file__.startswith(sys.argv[1])
plan = galvatron.plan(sys.argv[1], "titan-rtx-8", batch=8)
preset = galvatron.plan("mistral-tiny", "titan-rtx-8", batch=8)
assert "torch" not in sys.modules

from galvatron.core.spec import Training
from galvatron.families.build import build_meta
from galvatron.families.registry import layered_model
model = build_meta({**preset.model.config, "architectures": None}, Training())
layers = layered_model(model).layers
print(json.dumps({
    "families": [plan.model.family, preset.model.family],
    "last preset": model_names()[-1],
    "class": type(model).__name__,
    "adapter": layers[0].__module__,
    "layers": [layer.kind for layer in layers],
}))
"""


@pytest.mark.slow
def test_a_new_folder_is_a_new_family(tmp_path: Path) -> None:
    """A copy of the package with one folder more plans a configuration and a preset of it, and cuts its model."""
    shutil.copytree(PACKAGE, tmp_path / "galvatron", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "num_hidden_layers": 2}')
    folder = tmp_path / "galvatron" / "families" / "mistral"
    shutil.copytree(tmp_path / "galvatron" / "families" / "llama", folder)
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8").replace("llama", "mistral").replace("Llama", "Mistral")
        path.write_text(text.replace("    rank=3,\n", ""), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "families": ["mistral", "mistral"],
        "last preset": "mistral-tiny",
        "class": "MistralForCausalLM",
        "adapter": "galvatron.families.mistral.adapter",
        "layers": ["embedding", "decoder", "decoder", "head"],
    }


def test_the_papers_presets_come_first_and_tiny_ones_last() -> None:
    names = preset_names()
    assert [name for name in names if name.endswith("-32")] == list(names[0:8:2])
    assert all("-tiny" in name for name in names[-len(FOLDERS) :])
