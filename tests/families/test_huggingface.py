"""Reading config.json: defaults, and every way it can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families import load_model


def read(folder: Path, content: object) -> ModelSpec:
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return load_model(folder, Training())


@pytest.mark.parametrize(
    ("model_type", "parameters"),
    [
        ("bert", 109_514_298),
        ("gpt2", 124_439_808),
        ("llama", 6_738_415_616),
        ("t5", 60_506_624),
        ("vit", 85_800_194),
        ("swin", 27_520_892),
    ],
)
def test_what_is_left_out_is_hugging_faces_default(tmp_path: Path, model_type: str, parameters: int) -> None:
    """The counts are those of the classes built from an empty configuration (two labels for images)."""
    model = read(tmp_path, {"model_type": model_type})
    assert model.family == model_type
    assert model.parameters == parameters


def test_other_spellings_nulls_and_unknown_fields_are_taken(tmp_path: Path) -> None:
    spelled = {"model_type": "gpt2", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    model = read(tmp_path, spelled | {"n_inner": None, "task_specific_params": {"x": 1}})
    assert model.parameters == 354_823_168


@pytest.mark.parametrize(
    ("content", "field", "value", "expected"),
    [
        ({"model_type": "bret"}, "model_type", "'bret'", "did you mean 'bert'"),
        ({"model_type": "mamba"}, "model_type", "'mamba'", "one of bert, gpt2, llama, t5, vit, swin"),
        ({"model_type": 3}, "model_type", "3", "a string"),
        ({}, "model_type", "missing", "a string"),
        ({"model_type": "bert", "hidden_size": -768}, "hidden_size", "-768", "an integer from 1"),
        ({"model_type": "bert", "hidden_size": 768.5}, "hidden_size", "768.5", "an integer from 1"),
        ({"model_type": "bert", "hidden_size": "768"}, "hidden_size", "'768'", "an integer from 1"),
        ({"model_type": "bert", "hidden_size": True}, "hidden_size", "True", "an integer from 1"),
        ({"model_type": "bert", "hidden_size": 10**30}, "hidden_size", "10000", "an integer from 1"),
        ({"model_type": "bert", "num_hidden_layers": 0}, "num_hidden_layers", "0", "an integer from 1"),
        ({"model_type": "bert", "num_hidden_layers": 10**9}, "num_hidden_layers", "1000000000", "to 2048"),
        ({"model_type": "bert", "num_attention_heads": 7}, "num_attention_heads", "7", "divisor of hidden_size"),
        ({"model_type": "bert", "hidden_dropout_prob": 1.5}, "hidden_dropout_prob", "1.5", "a probability"),
        ({"model_type": "bert", "hidden_dropout_prob": 10**400}, "hidden_dropout_prob", "1000", "a probability"),
        ({"model_type": "bert", "tie_word_embeddings": 1}, "tie_word_embeddings", "1", "true or false"),
        ({"model_type": "bert", "hidden_act": "snake"}, "hidden_act", "'snake'", "one of relu, gelu"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder", "True", "only the BERT encoder"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention", "True", "not supported"),
        ({"model_type": "llama", "num_key_value_heads": 5}, "num_key_value_heads", "5", "a divisor of"),
        ({"model_type": "t5", "feed_forward_proj": "odd-gelu"}, "feed_forward_proj", "'odd-gelu'", "'gated-'"),
        ({"model_type": "t5", "is_encoder_decoder": False}, "is_encoder_decoder", "False", "both its stacks"),
        ({"model_type": "vit", "image_size": [224]}, "image_size", r"\[224\]", "height and width"),
        ({"model_type": "vit", "image_size": [224, "a"]}, r"image_size\[1\]", "'a'", "an integer"),
        ({"model_type": "vit", "patch_size": 500}, "patch_size", r"\[500, 500\]", "at most the image_size"),
        ({"model_type": "vit", "id2label": []}, "id2label", r"\[\]", "names each class"),
        ({"model_type": "swin", "depths": []}, "depths", r"\[\]", "a list of 1 to 16"),
        ({"model_type": "swin", "depths": [2, 0]}, r"depths\[1\]", "0", "an integer from 1"),
        ({"model_type": "swin", "depths": [2, 2]}, "num_heads", r"\[3, 6, 12, 24\]", "as many numbers as depths"),
        ({"model_type": "swin", "num_heads": [5, 6, 12, 24]}, r"num_heads\[0\]", "5", "divisor of the stage's width"),
        ({"model_type": "swin", "window_size": 8}, "window_size", "8", "stage 4 has 7×7 tokens"),
        ({"model_type": "swin", "mlp_ratio": 0}, "mlp_ratio", "0", "a number above 0"),
    ],
)
def test_errors_name_file_field_value_and_remedy(
    tmp_path: Path, content: object, field: str, value: str, expected: str
) -> None:
    with pytest.raises(InvalidInput, match=rf"config\.json: {field} is {value}.*{expected}"):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "is nested too deep to be read; expected a Hugging Face configuration"),
        ('{"model_type": "bert", "hidden_size": ' + "9" * 5000 + "}", "is not JSON"),
        ("[1]", "holds a list"),
        ('{"model_type": "bert", "hidden_dropout_prob": NaN}', "hidden_dropout_prob is nan; expected a probability"),
        ('{"model_type": "bert", "hidden_size": Infinity}', "hidden_size is inf; expected an integer"),
        ('{"model_type": "bert", "of_my_own": [NaN]}', "cannot be part of a plan .* finite"),
        ('{"model_type": "bert", "of_my_own": "\\ud800"}', "cannot be part of a plan .* Unicode"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(tmp_path, content)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"absent\.json: no such file"):
        load_model(tmp_path / "absent.json", Training())
    with pytest.raises(InvalidInput, match=r"config\.json: no such file"):
        load_model(tmp_path, Training())
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="is not UTF-8 text"):
        load_model(tmp_path, Training())
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(InvalidInput, match="no such file"):
        load_model(tmp_path / "folder.json", Training())
