"""An exported model has the tokenizer of its run, so that it can be talked to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from newcomer import chat_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from galvatron.core.errors import InvalidInput
from galvatron.train.checkpoints.companions import keep_companions, write_companions


def _exported(source: Path, out: Path, kept: Path) -> tuple[str | None, Any]:
    stock: Any = AutoModelForCausalLM.from_pretrained(source)
    out.mkdir()
    for name in ("config.json", "model.safetensors"):  # what an export writes first
        shutil.copyfile(source / name, out / name)
    return write_companions(kept, out, stock), stock


def test_an_exported_model_generates_as_the_one_it_came_from(tmp_path: Path) -> None:
    source = chat_model(tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "max_new_tokens": 7}))
    keep_companions(tmp_path / "kept", tokenizer=source, model=source)
    missing, stock = _exported(source, tmp_path / "out", tmp_path / "kept")
    assert missing is None
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 7
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "who?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (
        exported.generate(**asked, pad_token_id=0).tolist()
        == stock.generate(**asked, max_new_tokens=7, pad_token_id=0, do_sample=False).tolist()
    )


def test_a_tokenizer_made_for_the_run_says_which_token_ends(tmp_path: Path) -> None:
    source = chat_model(tmp_path / "source")
    (source / "generation_config.json").unlink()
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**content, "eos_token_id": 9, "pad_token_id": None}))
    keep_companions(tmp_path / "kept", tokenizer=source, model=None)
    assert _exported(source, tmp_path / "out", tmp_path / "kept")[0] is None
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (settings.eos_token_id, settings.pad_token_id) == (1, 0)


def test_a_run_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    source = chat_model(tmp_path / "source")
    keep_companions(tmp_path / "kept", tokenizer=None, model=None)
    missing, _ = _exported(source, tmp_path / "out", tmp_path / "kept")
    assert missing is not None
    assert "no tokenizer" in missing


def test_what_is_no_file_is_not_copied(tmp_path: Path) -> None:
    """A device would never end."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(InvalidInput, match=r"tokenizer.json: is no file"):
        write_companions(tmp_path / "kept", tmp_path / "out", None)
