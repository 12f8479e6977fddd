"""Weights of one layer at a time: initial, saved, in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from stock_models import CONFIGS, noise
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.families.build import build_meta
from galvatron.families.layer import LayeredModel
from galvatron.families.registry import layered_model
from galvatron.families.saved import SavedWeights
from galvatron.families.weights import InitialWeights, ModelWeights, Weights


def _layered(name: str) -> LayeredModel:
    return layered_model(build_meta(CONFIGS[name](), Training()))


def _stock(name: str) -> Any:
    torch.manual_seed(0)
    model = type(build_meta(CONFIGS[name](), Training()))(CONFIGS[name]())
    noise(model)
    return model


def _drawn(tensor: Tensor) -> bool:
    """Whether it holds random values, not ones or zeros."""
    return bool(tensor.flatten().diff().ne(0).double().mean() > 0.5)


def _whole(layered: LayeredModel, weights: Weights, order: list[int] | None = None) -> dict[str, Tensor]:
    """All tensors by stock name; tied ones must agree."""
    whole: dict[str, Tensor] = {}
    for index in order or range(len(layered.layers)):
        layer = layered.layers[index]
        tensors = weights.tensors(index)
        assert {key: own.shape for key, own in tensors.items()} == {k: p.shape for k, p in layer.named_parameters()}
        for key, own in tensors.items():
            assert own.dtype == torch.float32
            assert own.device.type == "cpu"
            torch.testing.assert_close(whole.setdefault(layer.stock_name(key), own), own, rtol=0, atol=0)
    for tie in layered.ties:
        stock = [whole[layered.layers[use.layer].stock_name(use.name)] for use in tie.uses]
        assert all(torch.equal(stock[0], other) for other in stock)
    return whole


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_threads_draw_the_same_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layered = _layered(name)
    one_by_one = _whole(layered, InitialWeights(layered, 3))
    monkeypatch.setattr("galvatron.families.weights._LARGE", 1)
    side_by_side = _whole(layered, InitialWeights(layered, 3))
    assert side_by_side.keys() == one_by_one.keys()
    assert all(torch.equal(side_by_side[key], own) for key, own in one_by_one.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_initial_weights_depend_on_seed_and_name_only(name: str) -> None:
    layered = _layered(name)
    first = _whole(layered, InitialWeights(layered, seed=3))
    torch.manual_seed(99)
    backwards = list(reversed(range(len(layered.layers))))
    second = _whole(layered, InitialWeights(layered, seed=3), backwards)
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = _whole(layered, InitialWeights(layered, seed=4))
    random = [key for key, own in first.items() if _drawn(own)]
    assert random
    assert not any(torch.equal(first[key], other[key]) for key in random)
    values = [tuple(first[key].flatten()[:4].tolist()) for key in random]
    tied = sum(len(tie.uses) - 1 for tie in layered.ties)
    assert len(set(values)) == len(values) - tied, "no two parameters are drawn alike"


def test_initial_weights_leave_the_random_state_alone() -> None:
    layered = _layered("bert")
    state = torch.get_rng_state()
    InitialWeights(layered, seed=3).tensors(1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit", "swin"])
def test_initial_weights_have_the_stock_models_statistics(name: str) -> None:
    """Mean and deviation of each parameter, in a wider model so that they are sharp."""
    config = CONFIGS[name]()
    wide = {"hidden_size": 128, "n_embd": 128, "d_model": 128, "intermediate_size": 96, "d_kv": 32, "embed_dim": 64}
    for field, value in wide.items():
        if hasattr(config, field) and not (name == "swin" and field == "hidden_size"):
            setattr(config, field, value)
    if name == "llama":
        config.head_dim = 32
    layered = layered_model(build_meta(config, Training()))
    drawn = _whole(layered, InitialWeights(layered, seed=0))
    torch.manual_seed(0)
    stock = type(layered.model)(config)
    for key, own in stock.named_parameters():
        expected, found = own.detach(), drawn[key]
        if not _drawn(expected):
            assert torch.equal(found, expected), key
        else:
            deviation, error = expected.std(), 6 / expected.numel() ** 0.5
            assert abs(found.std() / deviation - 1) < error, key
            assert abs(found.mean() - expected.mean()) < error * deviation, key
            assert found.abs().max() < 2 * expected.abs().max(), key
    if name == "bert":
        assert not drawn["bert.embeddings.word_embeddings.weight"][config.pad_token_id].any()


def test_initial_weights_do_not_need_the_model_as_it_was() -> None:
    """The runtime will have split and sharded the layers by the time it asks."""
    layered = _layered("gpt2")
    weights = InitialWeights(layered, seed=0)
    before = weights.tensors(1)
    layered.layers[1].block = nn.Identity()
    after = weights.tensors(1)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_initial_weights_of_a_parameter_without_a_rule() -> None:
    layered = _layered("vit")
    layered.layers[0].embeddings.mystery = nn.Parameter(torch.empty(3, device="meta"))  # type: ignore[union-attr]
    with pytest.raises(InvalidInput, match=r"no rule to initialise vit\.embeddings\.mystery"):
        InitialWeights(layered, seed=0).tensors(0)


@pytest.mark.parametrize(("name", "shards"), [*((name, "4KB") for name in CONFIGS), ("bert", None), ("vit", None)])
def test_saved_weights_are_the_stock_models(name: str, shards: str | None, tmp_path: Path) -> None:
    model = _stock(name)
    model.save_pretrained(tmp_path, **({} if shards is None else {"max_shard_size": shards}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards is not None)
    layered = _layered(name)
    found = _whole(layered, SavedWeights(layered, tmp_path))
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert all(torch.equal(own, expected.get(key, own)) for key, own in found.items())
    assert {id(own) for own in expected.values()} - {id(expected[key]) for key in found if key in expected} <= {
        id(expected.get("cls.predictions.bias"))  # of an untied BERT: used by nothing
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_from_a_model_in_memory(name: str) -> None:
    model = _stock(name).double()
    layered = _layered(name)
    found = _whole(layered, ModelWeights(layered, model))
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert all(torch.equal(own, expected[key].float()) for key, own in found.items() if key in expected)
    itself = layered_model(model)
    assert _whole(itself, ModelWeights(itself)).keys() == found.keys()


def test_a_model_in_memory_must_have_values() -> None:
    with pytest.raises(InvalidInput, match="without values"):
        ModelWeights(_layered("bert"))
    with pytest.raises(InvalidInput, match="missing"):
        ModelWeights(_layered("bert"), nn.Linear(2, 2))


def test_names_of_tied_weights_are_interchangeable(tmp_path: Path) -> None:
    """Old checkpoints hold a tied weight under its other name, or under both."""
    model = _stock("bert")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["cls.predictions.decoder.weight"] = tensors.pop("bert.embeddings.word_embeddings.weight")
    tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")
    save_file(tensors, path, {"format": "pt"})
    layered = _layered("bert")
    found = _whole(layered, SavedWeights(layered, tmp_path))
    assert torch.equal(found["bert.embeddings.word_embeddings.weight"], tensors["cls.predictions.decoder.weight"])


def test_old_names_of_norms(tmp_path: Path) -> None:
    model = _stock("bert")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): own
        for key, own in load_file(path).items()
    }
    assert any("gamma" in key for key in old)
    save_file(old, path, {"format": "pt"})
    layered = _layered("bert")
    _whole(layered, SavedWeights(layered, tmp_path))


def test_a_base_model_lacks_the_head(tmp_path: Path) -> None:
    model = _stock("bert")
    model.bert.save_pretrained(tmp_path)
    with pytest.raises(
        InvalidInput, match=r"5 of 58 .*cls\.predictions\.transform.*base model without this head"
    ) as raised:
        SavedWeights(_layered("bert"), tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_a_base_model_is_enough_where_the_head_is_tied(tmp_path: Path) -> None:
    model = _stock("gpt2")
    model.transformer.save_pretrained(tmp_path)
    layered = _layered("gpt2")
    found = _whole(layered, SavedWeights(layered, tmp_path))
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight)


def test_missing_layers_and_wrong_shapes(tmp_path: Path) -> None:
    _stock("bert").save_pretrained(tmp_path)
    deeper = CONFIGS["bert"]()
    deeper.num_hidden_layers = 4
    with pytest.raises(InvalidInput, match=r"16 of 74 .*bert\.encoder\.layer\.3.*fewer layers"):
        SavedWeights(layered_model(build_meta(deeper, Training())), tmp_path)
    wider = CONFIGS["bert"]()
    wider.intermediate_size = 32
    message = r"bert\.encoder\.layer\.0\.intermediate\.dense\.weight has shape \[24, 16\]; expected \[32, 16\]"
    with pytest.raises(InvalidInput, match=message):
        SavedWeights(layered_model(build_meta(wider, Training())), tmp_path)


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    layered = _layered("bert")
    with pytest.raises(InvalidInput, match="no such folder"):
        SavedWeights(layered, tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="neither"):
        SavedWeights(layered, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(InvalidInput, match="cannot be read as safetensors"):
        SavedWeights(layered, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(InvalidInput, match=r"model-1\.safetensors is missing"):
        SavedWeights(layered, tmp_path)
    index.write_text("{}")
    with pytest.raises(InvalidInput, match="is not an index"):
        SavedWeights(layered, tmp_path)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """A layer's tensors come from its own files: the others may even be gone by then."""
    model = _stock("llama")
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    layered = _layered("llama")
    weights = SavedWeights(layered, tmp_path)
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for key, file in files.items() if key.startswith("model.layers.1.")}
    for path in tmp_path.glob("*.safetensors"):
        if path.name not in needed:
            path.unlink()
    assert torch.equal(weights.tensors(2)["block.mlp.up_proj.weight"], model.model.layers[1].mlp.up_proj.weight)


def test_a_saved_model_can_be_read_back_by_transformers(tmp_path: Path) -> None:
    """The oracle for names: what from_pretrained reads is what we read, for a family whose files have older names."""
    _stock("vit").save_pretrained(tmp_path)
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path)
    layered = _layered("vit")
    found = _whole(layered, SavedWeights(layered, tmp_path))
    torch.testing.assert_close(found, {key: own.detach() for key, own in loaded.named_parameters()}, rtol=0, atol=0)


def _mixtral(layers: int, experts: int) -> tuple[Any, Any]:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2, "vocab_size": 20}
    config = transformers.MixtralConfig(
        **sizes, num_hidden_layers=layers, num_key_value_heads=1, num_local_experts=experts
    )
    config.architectures = ["MixtralForCausalLM"]
    torch.manual_seed(0)
    stock: Any = transformers.MixtralForCausalLM
    return config, stock(config)


@pytest.mark.parametrize("shards", [None, "4KB"])
def test_experts_that_are_saved_one_by_one(shards: str | None, tmp_path: Path) -> None:
    """The stock model computes with one tensor for all experts; checkpoints have one for each. There are eleven, so
    that the order of their numbers is not that of their names."""
    config, model = _mixtral(layers=2, experts=11)
    noise(model)
    model.save_pretrained(tmp_path, **({} if shards is None else {"max_shard_size": shards}))
    names = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert sum(".experts.10." in name for name in names) == 2 * 3
    layered = layered_model(build_meta(config, Training()))
    found = _whole(layered, SavedWeights(layered, tmp_path))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(own, found[name]) for name, own in model.named_parameters())


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    config, model = _mixtral(layers=1, experts=3)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: own for name, own in load_file(path).items() if ".experts.2." not in name}, path)
    with pytest.raises(InvalidInput, match=r"experts.* has shape \[2, 12, 8\]; expected \[3, 12, 8\]"):
        SavedWeights(layered_model(build_meta(config, Training())), tmp_path)
