"""``galvatron train FOLDER`` starts from the folder's own weights, with its own tokenizer, and says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from galvatron import InvalidInput, cli
from galvatron.train import start
from galvatron.train.settings import Settings
from galvatron.train.start import Asked


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def _asked(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Settings:
    found: list[Asked] = []
    monkeypatch.setattr(start, "train", lambda asked, screen: found.append(asked))
    monkeypatch.setattr(sys, "argv", ["galvatron", "train", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    return found[0].settings


def test_what_the_folder_has_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = _asked(monkeypatch, str(folder), "--data", "text")
    assert (settings.weights, settings.tokenizer) == (str(folder), str(folder))
    said = capsys.readouterr().out.replace("\n", "")
    assert "weights: those of" in said
    assert "--from-scratch" in said


def test_what_is_said_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _asked(monkeypatch, str(folder), "--from-scratch", "--tokenizer", "bytes")
    assert (settings.weights, settings.tokenizer) == (None, "bytes")
    assert _asked(monkeypatch, str(folder), "--weights", "elsewhere").weights == "elsewhere"


def test_names_and_folders_without_weights_start_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").unlink()
    settings = _asked(monkeypatch, str(folder), "--data", "text")
    assert (settings.weights, settings.tokenizer) == (None, str(folder))
    assert _asked(monkeypatch, str(folder)).tokenizer is None  # synthetic data has no words
    assert _asked(monkeypatch, "bert-base").weights is None


@pytest.mark.parametrize("other", [["--weights", "x"], ["--resume"]])
def test_both_are_a_mistake(
    folder: Path, other: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["galvatron", "train", str(folder), "--from-scratch", *other])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == InvalidInput.exit_status
    assert "exclude each other" in capsys.readouterr().err
