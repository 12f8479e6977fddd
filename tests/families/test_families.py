"""Layers of a cut model, one after the other, compute what the stock model computes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_models import CAUSAL, CONFIGS, batches, stock_model
from torch import Tensor, nn
from torch.nn import functional

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ModelSpec, Training
from galvatron.families import load_model
from galvatron.families.build import build_meta
from galvatron.families.layer import LayeredModel
from galvatron.families.registry import layered_model
from galvatron.families.rules import Attribute, Columns, Rows, Table, Vocabulary


def _loss(layered: LayeredModel, batch: dict[str, Tensor]) -> Tensor:
    """Of the layers; each sees no more of the batch than the inputs it names."""
    activations: tuple[Tensor, ...] = ()
    for layer in layered.layers:
        seen = {name: tensor for name, tensor in batch.items() if name in layer.inputs}
        activations = layer(activations, layered.context(seen, torch.float64))
    (loss,) = activations
    return loss / layered.targets(batch)


def _stock_loss(model: Any, name: str, batch: dict[str, Tensor]) -> Tensor:
    """In fp64 from the stock logits: some stock models compute their own loss in fp32."""
    outputs = model(**batch)
    logits, labels = outputs.logits, batch["labels"]
    if name in CAUSAL:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.flatten())
    torch.testing.assert_close(loss, outputs.loss, rtol=1e-6, atol=0, check_dtype=False)
    return loss


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: own.grad for name, own in model.named_parameters() if own.grad is not None}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_the_stock_models(name: str, attention: str) -> None:
    model = stock_model(name, attention)
    reference = copy.deepcopy(model)
    layered = layered_model(model)
    for kind, batch in batches(layered).items():
        for own in (model, reference):
            own.zero_grad()
        expected = _stock_loss(reference, name, batch)
        torch.autograd.backward(expected)
        loss = _loss(layered, batch)
        torch.autograd.backward(loss)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10, msg=kind)
        torch.testing.assert_close(_gradients(model), _gradients(reference), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_optional_inputs(name: str) -> None:
    """Positions, token types, decoder ids and masks that a user gives are the stock model's too."""
    model = stock_model(name, "sdpa")
    layered = layered_model(model)
    batch = batches(layered)["plain"]
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]).expand(4, -1)
    types = torch.arange(12).expand(4, -1) % 2
    extras = {
        "bert": {"position_ids": packed, "token_type_ids": types},
        "gpt2": {"position_ids": packed, "token_type_ids": types},
        "llama": {"position_ids": packed},
        "t5": {"decoder_input_ids": batch["labels"].flip(1), "decoder_attention_mask": (types + 1).clamp(max=1)},
    }
    given = {**batch, **extras[name]}
    expected = _stock_loss(model, name, given)
    torch.testing.assert_close(_loss(layered, given), expected, rtol=1e-10, atol=1e-10)
    assert not torch.isclose(expected, _stock_loss(model, name, batch))


@pytest.mark.parametrize("name", CONFIGS)
def test_no_mask_tensor_without_padding(name: str) -> None:
    """So that attention can use its fused causal kernel."""
    layered = layered_model(stock_model(name, "sdpa"))
    context = layered.context(batches(layered)["plain"], torch.float32)
    masks = [getattr(context, field, None) for field in ("mask", "encoder_mask", "decoder_mask", "cross_mask")]
    assert masks == [None] * 4


def _spec(name: str, folder: Path) -> ModelSpec:
    config = CONFIGS[name]()
    config.save_pretrained(folder)
    return load_model(folder, Training(sequence_length=12 if hasattr(config, "vocab_size") else None))


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_the_planners(name: str, tmp_path: Path) -> None:
    spec = _spec(name, tmp_path)
    layered = layered_model(build_meta(CONFIGS[name](), Training()))
    assert [layer.kind for layer in layered.layers] == [layer.name for layer in spec.layers]
    counted = [sum(own.numel() for own in layer.parameters()) for layer in layered.layers]
    expected = [layer.parameters for layer in spec.layers]
    if name.startswith("t5"):
        # The planner counts a stack's table of position biases with the embedding before; here each block has it.
        config = CONFIGS[name]()
        table = config.relative_attention_num_buckets * config.num_heads
        signs = {"embedding": -1, "decoder_embedding": -1, "encoder": 1, "decoder": 1, "head": 0}
        expected = [count + signs[layer.name] * table for count, layer in zip(expected, spec.layers, strict=True)]
    if name == "bert-untied":
        expected[-1] -= CONFIGS[name]().vocab_size  # the head's own bias, which the stock model never uses
    assert counted == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_in_a_layer_under_its_stock_name(name: str) -> None:
    model = build_meta(CONFIGS[name](), Training())
    layered = layered_model(model)
    named = {stock: own for layer in layered.layers for _, stock, own in layer.stock_parameters()}
    unused = {"cls.predictions.bias"} if name == "bert-untied" else set()
    stock = dict(model.named_parameters())
    assert stock.keys() - named.keys() == unused
    every = dict(model.named_parameters(remove_duplicate=False))
    assert all(every[key] is own for key, own in named.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_ties_are_all_the_shared_parameters(name: str) -> None:
    layered = layered_model(build_meta(CONFIGS[name](), Training()))
    uses: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layered.layers):
        for own_name, own in layer.named_parameters():
            uses.setdefault(own, []).append((index, own_name))
    shared = {tuple(places) for places in uses.values() if len(places) > 1}
    assert {tuple((use.layer, use.name) for use in tie.uses) for tie in layered.ties if len(tie.uses) > 1} == shared


@pytest.mark.parametrize("name", CONFIGS)
def test_rules_name_what_is_there(name: str) -> None:
    from transformers.pytorch_utils import Conv1D

    for layer in layered_model(build_meta(CONFIGS[name](), Training())).layers:
        for rule in layer.rules:
            if isinstance(rule, Table):
                assert layer.get_parameter(rule.path).shape[rule.dim] in (2, 4)
            elif isinstance(rule, Attribute):
                path, _, field = rule.path.rpartition(".")
                assert isinstance(getattr(layer.get_submodule(path), field), int)
            elif isinstance(rule, Columns | Rows):
                assert isinstance(layer.get_submodule(rule.path), nn.Linear | Conv1D)
            elif isinstance(rule, Vocabulary):
                assert isinstance(layer.get_submodule(rule.path), nn.Embedding)
            else:
                assert layer.get_submodule(rule.path)


def test_example_is_reproducible_and_complete() -> None:
    for name in CONFIGS:
        model = stock_model(name, "sdpa")
        first, second = (batches(layered_model(model))["plain"] for _ in range(2))
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert layered_model(model).required <= first.keys()


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("bert", "is_decoder", True), ("gpt2", "add_cross_attention", True), ("vit", "problem_type", "regression")],
)
def test_refuses_what_it_would_compute_wrongly(name: str, field: str, value: object) -> None:
    config = CONFIGS[name]()
    setattr(config, field, value)
    with pytest.raises(InvalidInput, match=field):
        layered_model(build_meta(config, Training()))


def test_saving_a_cut_t5_still_writes_each_table_once(tmp_path: Path) -> None:
    from transformers import T5ForConditionalGeneration

    model = stock_model("t5", "sdpa").float()
    names = {name for name, _ in model.named_parameters()}
    layered_model(model)
    model.save_pretrained(tmp_path)
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert {name for name, _ in loaded.named_parameters()} == names
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(model.named_parameters()))
