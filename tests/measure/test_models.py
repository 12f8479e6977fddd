"""Models of any architecture: traced from the stock model, kept in a file, planned without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.files.models import dump_model, read_model
from galvatron.core.spec import Precision, Training
from galvatron.families import load_model
from galvatron.families.huggingface import UnknownArchitecture
from galvatron.measure.models import load_any_model

_TRAINING = Training(dropout=False, sequence_length=16)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALVATRON_CACHE", str(tmp_path / "cache"))


def _folder(path: Path, kind: str, name: str, **sizes: int) -> Path:
    config = AutoConfig.for_model(
        kind, num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=96, **sizes
    )
    config.architectures = [name]
    config.save_pretrained(path)
    return path


def test_any_folder_is_planned_and_the_second_time_without_torch(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "qwen", "qwen3", "Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8)
    plan = galvatron.plan(folder, "h100-8", sequence_length=16, batch=64)
    assert plan.model.family == "generic"
    assert plan.model.kinds[1].tensor_parallel is not None
    assert plan.model.config is not None
    assert plan.model.config["architectures"] == ["Qwen3ForCausalLM"]
    again = (
        "import sys, galvatron\n"
        f"plan = galvatron.plan({str(folder)!r}, 'h100-8', sequence_length=16, batch=64)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print(plan.model.digest)\n"
    )
    done = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == plan.model.digest


def test_a_head_for_classes_is_planned_as_that(tmp_path: Path) -> None:
    """Of a known family, too: its counted facts are those of the head of pre-training."""
    folder = _folder(tmp_path / "bert", "bert", "BertForSequenceClassification")
    with pytest.raises(UnknownArchitecture, match="BertForMaskedLM, or no class"):
        load_model(folder, _TRAINING)
    spec = load_any_model(folder, _TRAINING)
    masked = load_any_model(_folder(tmp_path / "masked", "bert", "BertForMaskedLM"), _TRAINING)
    assert masked.family == "bert"
    assert spec.family == "generic"
    assert spec.layers[-1].parameters < masked.layers[-1].parameters - masked.layers[-1].tied_parameters


def test_a_model_file_is_read_back_equal(tmp_path: Path) -> None:
    spec = load_any_model(_folder(tmp_path / "olmo", "olmo2", "Olmo2ForCausalLM", num_key_value_heads=4), _TRAINING)
    path = tmp_path / "model.json"
    path.write_text(dump_model(spec), encoding="utf-8")
    assert read_model(path) == spec
    assert load_model(path, _TRAINING) == spec
    with pytest.raises(InvalidInput, match=r"was traced for precision fp32, but bf16 is asked for"):
        load_model(path, Training(precision=Precision.BF16))
    content = json.loads(path.read_text(encoding="utf-8"))
    content["order"][1][0] = "blocks"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InvalidInput, match="order names 'blocks', which is not among kinds"):
        load_model(path, _TRAINING)
    del content["kinds"][0]["parameters"]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"kinds\[0\].parameters"):
        load_model(path, _TRAINING)


def test_an_architecture_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing", "architectures": ["NoSuchThing"]}')
    with pytest.raises(InvalidInput, match=r"'no-such-thing', which transformers .* does not know"):
        load_any_model(tmp_path, _TRAINING)
