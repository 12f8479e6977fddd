"""The one way in: what a source may be, what is said when it is none, and what loading costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.model import Training
from galvatron.families import load_model


def test_a_close_name_is_suggested() -> None:
    with pytest.raises(InvalidInput, match=r"unknown model 'bert-hueg-32'; did you mean .*bert-huge-32"):
        load_model("bert-hueg-32", Training())


@pytest.mark.parametrize(
    "name", ["", "zzz", "bert-huge-0", "bert-huge-", "bert-base-32", "bert-huge-32 ", "x" * 5000, "a\0b"]
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"unknown model|config\.json"):
        load_model(name, Training())


def test_a_configuration_by_file_and_by_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-gpt"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}))
    by_folder = load_model(folder, Training())
    by_name = load_model(str(folder), Training())
    by_file = load_model(folder / "config.json", Training())
    assert by_folder == by_name == by_file
    assert by_folder.name == "my-gpt"
    assert [layer.name for layer in by_folder.layers] == ["embedding", "decoder", "decoder", "decoder", "head"]


def test_a_preset_wins_over_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert load_model("gpt2", Training()).family == "gpt2"
    with pytest.raises(InvalidInput, match=r"config\.json: no such file"):
        load_model("./gpt2", Training())


def test_presets_need_neither_torch_nor_pydantic() -> None:
    program = """
import sys
from galvatron.core.spec.model import Training
from galvatron.families import load_model, model_names
for name in model_names():
    load_model(name, Training())
print([name for name in ("torch", "transformers", "pydantic", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
