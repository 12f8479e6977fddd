"""The configuration that a model carries builds, with Hugging Face's own classes, the model that was counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from galvatron.core.spec.model import Training
from galvatron.families import load_model, model_names
from galvatron.families.bert.facts import Bert
from galvatron.families.family import Architecture
from galvatron.families.gpt2.facts import Gpt2
from galvatron.families.llama.facts import Llama
from galvatron.families.swin.facts import Swin
from galvatron.families.t5.facts import T5
from galvatron.families.vit.facts import Vit

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# Every hyper-parameter away from its default, so that one that is left out or misspelled shows.
ODD: dict[str, Architecture] = {
    "bert": Bert(
        hidden=24,
        layers=3,
        heads=2,
        inner=40,
        vocabulary=99,
        positions=33,
        token_types=3,
        activation="relu",
        hidden_dropout=0.0,
        attention_dropout=0.2,
        tied=False,
    ),
    "gpt2": Gpt2(
        hidden=24,
        layers=3,
        heads=2,
        inner=40,
        vocabulary=99,
        positions=33,
        activation="relu",
        embedding_dropout=0.0,
        hidden_dropout=0.2,
        attention_dropout=0.3,
        tied=False,
    ),
    "llama": Llama(
        hidden=24,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=10,
        inner=40,
        vocabulary=99,
        positions=33,
        rope_theta=77.0,
        norm_epsilon=1e-3,
        activation="relu",
        attention_bias=True,
        feed_forward_bias=True,
        attention_dropout=0.2,
        tied=True,
    ),
    "t5": T5(
        hidden=24,
        encoders=3,
        decoders=2,
        heads=2,
        head_dim=10,
        inner=40,
        vocabulary=99,
        positions=33,
        buckets=8,
        activation="gelu_new",
        gated=True,
        dropout=0.0,
    ),
    "vit": Vit(
        hidden=24,
        layers=3,
        heads=2,
        inner=40,
        image=(32, 48),
        patch=(8, 16),
        channels=1,
        labels=7,
        qkv_bias=False,
        activation="relu",
        hidden_dropout=0.1,
        attention_dropout=0.2,
    ),
    "swin": Swin(
        hidden=24,
        depths=(1, 3),
        heads=(2, 4),
        window=4,
        inner_ratio=2.5,
        image=(64, 96),
        patch=(4, 8),
        channels=1,
        labels=7,
        qkv_bias=False,
        absolute_positions=True,
        activation="relu",
        hidden_dropout=0.1,
        attention_dropout=0.2,
    ),
}


@pytest.mark.parametrize("name", [*model_names(), *ODD])
def test_the_configuration_builds_the_model(name: str, tmp_path: Path) -> None:
    """Built on the meta device by the class it names: as many parameters. Read back: the same facts."""
    model = ODD[name].spec(name, Training()) if name in ODD else load_model(name, Training())
    assert model.config is not None
    (architecture,) = model.config["architectures"]
    config = transformers.AutoConfig.for_model(**model.config)
    with torch.device("meta"):
        built = getattr(transformers, architecture)(config)
        built.tie_weights()
    assert sum(parameter.numel() for parameter in built.parameters()) == model.parameters
    (tmp_path / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    again = load_model(tmp_path, Training())
    assert again.digest == model.digest
    assert again.config == model.config


@pytest.mark.parametrize("name", ODD)
def test_every_field_is_one_of_hugging_faces(name: str) -> None:
    """A field that its class does not have would be kept and change nothing."""
    given = ODD[name].spec(name, Training()).config
    assert given is not None
    config = transformers.AutoConfig.for_model(**given)
    default = transformers.AutoConfig.for_model(name)
    legacy = {"rope_theta", "n_positions" if name == "t5" else "", "decoder_start_token_id"}
    assert not [field for field in given if field not in legacy and not hasattr(default, field)]
    assert {field for field in given if getattr(config, field, given[field]) != given[field]} == set()


def test_names_say_what_a_llama_is() -> None:
    """Positions and norms differ between versions though no count shows it (values from the models' own files)."""
    versions = {name: load_model(name, Training()).config or {} for name in ("llama2-7b", "llama3-8b")}
    assert {name: (config["rope_theta"], config["rms_norm_eps"]) for name, config in versions.items()} == {
        "llama2-7b": (10_000.0, 1e-5),
        "llama3-8b": (500_000.0, 1e-5),
    }
    built = transformers.AutoConfig.for_model(**versions["llama3-8b"])
    assert built.rope_parameters["rope_theta"] == 500_000.0
