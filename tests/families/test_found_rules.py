"""Tensor-parallel rules of a model that transformers has no plan of: what a block that is watched shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from longer import longer
from stock_models import CONFIGS
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from galvatron.core.spec import Training
from galvatron.families.build import build_meta
from galvatron.families.generic import tensor_plan
from galvatron.families.generic.adapter import Generic
from galvatron.families.generic.found_rules import found_rules
from galvatron.families.generic.stubs import Call
from galvatron.families.generic.tensor_plan import block_rules, rules_within
from galvatron.families.generic.tensor_rules import TensorRules, _Run
from galvatron.families.registry import layered_model
from galvatron.families.rules import (
    AddedBias,
    Attribute,
    Columns,
    Experts,
    PartialGradients,
    Region,
    Rows,
    Rule,
    Table,
)
from galvatron.families.tiny import tiny_config
from galvatron.measure.describe import describe
from galvatron.runtime.split_trial import split_difference, split_problems

_TRAINING = Training(dropout=False)


def _model(kind: str, name: str, **sizes: Any) -> nn.Module:
    config = tiny_config(AutoConfig.for_model(kind, **sizes), degree=2)
    config.architectures = [name]
    return build_meta(config, _TRAINING, as_named=True)


def _rules(kind: str, name: str, **sizes: Any) -> TensorRules:
    return Generic(_model(kind, name, **sizes)).tensor_rules


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        longer("mistral", "MistralForCausalLM"),
        longer("gemma3_text", "Gemma3ForCausalLM"),
        longer("cohere", "CohereForCausalLM"),
        longer("phi3", "Phi3ForCausalLM"),
        longer("glm", "GlmForCausalLM"),
        longer("starcoder2", "Starcoder2ForCausalLM"),
        longer("gpt_neox", "GPTNeoXForCausalLM"),
    ],
)
def test_finds_what_transformers_says(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plans are the oracle: which projections, and how; what they gather right away may be split further here."""
    model = _model(kind, name)
    said = rules_within("block", block_rules(model, Generic(model).anatomy.name(0)))
    monkeypatch.setattr(tensor_plan, "plan_of", lambda model: {})
    found = Generic(model).tensor_rules
    assert found.guessed
    ours = next(iter(found.blocks.values()))
    gathered = {rule.path for rule in said if isinstance(rule, Columns) and rule.gathered}
    gathered |= {rule.path for rule in said if isinstance(rule, Rows) and rule.takes_whole}
    for split in (Columns, Rows):
        paths, expected = ({rule.path for rule in rules if isinstance(rule, split)} for rules in (ours, said))
        assert paths - gathered == expected - gathered
    parts = {rule.path: rule.parts for rule in said if isinstance(rule, Columns)}
    for rule in ours:
        assert not isinstance(rule, Columns) or rule.path in gathered or rule.parts == parts[rule.path]
    assert split_difference(model, _TRAINING, found) is None


def _plain(rule: Rule) -> Rule:
    return replace(rule, heads=None, input=None) if isinstance(rule, Columns) else rule


@pytest.mark.parametrize("name", ["bert", "vit", "swin"])
def test_finds_what_was_written_by_hand(name: str) -> None:
    """The rules of the families here, whose attention and feed-forward network end outside of their regions."""
    model = build_meta(CONFIGS[name](), _TRAINING)
    found = Generic(model).tensor_rules
    assert found.guessed
    written = {frozenset(layer.rules) for layer in layered_model(model).layers[1:-1] if layer.rules}
    assert {frozenset(map(_plain, own)) for own in found.blocks.values()} == written
    assert bool(found.divisible) == (name == "bert"), "the others have a number of tokens that nothing divides"


def test_draws_before_the_split_part_are_not_its_own() -> None:
    """Dropout of what all heads share, inside the module of the attention: ranks must drop the same."""
    with torch.device("meta"):
        for shared, expected in ((False, {Region("part", ("hidden",))}), (True, set())):
            block = nn.Module()
            block.part, block.down = _Part(shared), nn.Linear(16, 8)
            block.forward = lambda hidden, block=block: hidden + block.down(block.part(hidden))
            run = _Run.__new__(_Run)
            run._block, run._call, run._reads = block, Call(0, (torch.empty(2, 4, 8),), {}), None
            rules = run.with_inputs((Columns("part.up"), Rows("down")))
            assert {rule for rule in rules if isinstance(rule, Region)} == expected


class _Part(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.up, self.shared = nn.Linear(8, 16), shared
        self.table = nn.Parameter(torch.empty(16))

    def forward(self, hidden: Tensor) -> Tensor:
        table = nn.functional.dropout(self.table, 0.1) if self.shared else self.table
        return nn.functional.dropout(self.up(hidden), 0.1) + table


def test_what_a_plan_gathers_is_split_further() -> None:
    """GLM's gate and up projection are one weight, which transformers gathers right behind it."""
    model = _model("glm", "GlmForCausalLM")
    said = block_rules(model, "model.layers.0")
    assert Columns("mlp.gate_up_proj", gathered=True) in said
    rules = Generic(model).tensor_rules
    assert rules.guessed
    assert _outline(rules) >= {"Columns mlp.gate_up_proj of 2", "Rows mlp.down_proj"}
    assert not any(isinstance(rule, Rows) and rule.takes_whole for own in rules.blocks.values() for rule in own)
    assert split_problems(model, _TRAINING, rules) == (None, None)


def _outline(rules: TensorRules) -> set[str]:
    found = next(own for own in rules.blocks.values() if own)
    kinds = (Columns, Rows, Attribute, Table, PartialGradients)
    parts = {rule.path: f" of {rule.parts}" for rule in found if isinstance(rule, Columns) and rule.parts > 1}
    return {
        f"{type(rule).__name__} {rule.path.removeprefix('block.')}{parts.get(rule.path, '')}"
        for rule in found
        if isinstance(rule, kinds)
    }


def test_numbers_of_heads_are_divided() -> None:
    """OPT's attention makes its heads by the number that it keeps."""
    rules = _rules("opt", "OPTForCausalLM")
    assert _outline(rules) == {
        *(f"Columns self_attn.{name}_proj" for name in "qkv"),
        "Rows self_attn.out_proj",
        "Attribute self_attn.num_heads",
        "Columns fc1",
        "Rows fc2",
    }
    heads = {rule.heads for own in rules.blocks.values() for rule in own if isinstance(rule, Columns)}
    assert heads == {None, 4}


def test_projections_side_by_side_in_one_weight() -> None:
    """ModernBERT's query, key and value, and both halves of its gated feed-forward network."""
    assert _outline(_rules("modernbert", "ModernBertForMaskedLM")) == {
        "Columns attn.Wqkv of 3",
        "Rows attn.Wo",
        "Columns mlp.Wi of 2",
        "Rows mlp.Wo",
    }


def test_parameters_of_heads() -> None:
    """Swin V2 has a scale of each head, and positions that a network of their own makes: its last projection has an
    output of each head, the first one works for all of them."""
    found = _outline(_rules("swinv2", "Swinv2ForImageClassification", depths=[2, 2], num_heads=[4, 4]))
    between = {name for name in found if name.startswith(("Table", "Partial"))}
    positions = "attention.self.continuous_position_bias_mlp"
    assert between == {
        "Table attention.self.logit_scale",
        f"Table {positions}.2.weight",
        f"PartialGradients {positions}.0.weight",
        f"PartialGradients {positions}.0.bias",
    }


def test_a_norm_over_what_would_be_split_forbids_it() -> None:
    """BitNet has one before each last projection."""
    assert not any(_rules("bitnet", "BitNetForCausalLM").blocks.values())


def test_only_what_can_be_split_is() -> None:
    """MPT's attention is given biases of all heads."""
    assert _outline(_rules("mpt", "MptForCausalLM")) == {"Columns ffn.up_proj", "Rows ffn.down_proj"}


class _Feed(nn.Module):
    def __init__(self, leaks: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.leaks, self.twice = nn.Linear(8, 16), nn.Linear(16, 8), leaks, twice
        self.other = nn.Linear(8, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.relu(self.up(hidden))
        made: Tensor = hidden + self.down(inner)
        if self.leaks:
            made = made + inner.mean(-1, keepdim=True)
        return made + self.down(torch.relu(self.other(made))) if self.twice else made


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"up", "down"}),
        ({"leaks": True}, set()),  # what the first projection makes goes elsewhere too
        ({"twice": True}, set()),  # a projection that runs twice
    ],
)
def test_what_is_read_elsewhere_or_twice_is_not_split(options: dict[str, bool], expected: set[str]) -> None:
    with torch.device("meta"):
        block, hidden = _Feed(**options), torch.empty(2, 4, 8)
    found = found_rules(block, Call(0, (hidden,), {}), (hidden,))
    assert {rule.path for rules in found for rule in rules} == expected


def test_a_guess_that_a_tiny_copy_does_not_prove_is_refused() -> None:
    """Sizes that happen to be equal may mislead it in one of the two models."""
    model = _model("opt", "OPTForCausalLM")
    rules = Generic(model).tensor_rules
    assert split_problems(model, _TRAINING, rules) == (None, None)
    more = {kind: (*own, Attribute("block.self_attn.embed_dim")) for kind, own in rules.blocks.items()}
    other = TensorRules(blocks=more, guessed=True)
    for problem in split_problems(model, _TRAINING, other):
        assert problem == "a tiny copy fails when it is split (it is split otherwise than the model)"


def test_experts_in_the_standard_form_are_split() -> None:
    """transformers has no plan of gpt-oss. Its experts are transposed, gate and up stand in turns, and have biases."""
    model = _model("gpt_oss", "GptOssForCausalLM", intermediate_size=24)
    layered = Generic(model)
    rules = layered.tensor_rules
    assert rules.guessed
    for own in rules.blocks.values():
        assert {rule for rule in own if "experts" in rule.path} == {
            Experts("block.mlp.experts"),
            Table("block.mlp.experts.gate_up_proj", 2, pairs=True),
            Table("block.mlp.experts.gate_up_proj_bias", 1, pairs=True),
            Table("block.mlp.experts.down_proj", 1),
            AddedBias("block.mlp.experts.down_proj_bias"),
        }
    parallel = layered.tensor_parallel(layered.layers[1])
    assert parallel is not None
    width = layered.layers[1].get_parameter("block.mlp.experts.down_proj").shape[1]
    assert width in parallel.divides, "gates and what they multiply stay together"
    assert split_problems(model, _TRAINING, rules) == (None, None)


def test_experts_that_would_stay_whole_leave_the_layer_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm behind each expert needs all of what it makes. What is split beside such experts does not matter."""
    model = _model("gpt_oss", "GptOssForCausalLM")
    monkeypatch.setattr(GptOssExperts, "has_post_expert_norm", True, raising=False)
    for block in model.model.layers:  # type: ignore[union-attr]
        del block.mlp.experts.has_post_expert_norm
    monkeypatch.setattr(GptOssExperts, "post_expert_norm", nn.Identity(), raising=False)
    layered = Generic(model)
    assert layered.expert_rules.blocks
    assert layered.tensor_rules == TensorRules()
    assert not any(layer.rules for layer in layered.layers)


@pytest.mark.parametrize(("kind", "name"), [("bloom", "BloomForCausalLM"), ("seed_oss", "SeedOssForCausalLM")])
def test_dropout_of_what_is_whole_is_not_in_a_region(kind: str, name: str) -> None:
    """A function right behind the last projection: in a region each rank would drop other elements of the sum."""
    (rules, *_) = _rules(kind, name).blocks.values()
    assert Rows("block.mlp.dense_4h_to_h" if kind == "bloom" else "block.mlp.down_proj") in rules
    assert Region("block.mlp") not in rules


def test_widths_that_heads_do_not_divide_are_asked_of_a_degree() -> None:
    """Ranks with parts of different sizes would draw different numbers of random numbers."""
    for width, divides in ((50, (4, 50)), (64, (4,))):
        layered = Generic(_model("xglm", "XGLMForCausalLM").requires_grad_(True))
        block = layered.layers[1]
        for path, shape in (("block.fc1", (width, 32)), ("block.fc2", (32, width))):
            block.get_submodule(path).weight = nn.Parameter(torch.empty(shape, device="meta"))
            block.get_submodule(path).out_features = shape[0]  # type: ignore[assignment]
        parallel = layered.tensor_parallel(block)
        assert parallel is not None
        assert parallel.divides == divides


class _Picky(_Feed):
    def forward(self, hidden: Tensor) -> Tensor:
        return {16: super().forward}[self.up.out_features](hidden)  # a KeyError with half of it


def test_a_block_may_raise_what_it_likes() -> None:
    with torch.device("meta"):
        block, hidden = _Picky(), torch.empty(2, 4, 8)
    assert found_rules(block, Call(0, (hidden,), {}), (hidden,)) == ()


def test_a_model_with_a_hook_is_described_without_tp() -> None:
    """Its tiny copy has none, so only the model itself shows that it cannot be split."""
    model: Any = _model("opt", "OPTForCausalLM")
    ids = torch.zeros(2, 16, dtype=torch.long)
    assert describe(model, {"input_ids": ids, "labels": ids}).layers[1].tensor_parallel is not None
    model.model.decoder.layers[0].fc1.register_forward_hook(lambda *_: None)
    assert describe(model, {"input_ids": ids, "labels": ids}).layers[1].tensor_parallel is None


def test_a_head_whose_projection_is_only_read_is_whole() -> None:
    """MobileBERT multiplies by its weight and another one, put together."""
    layered = Generic(_model("mobilebert", "MobileBertForMaskedLM"))
    embedding, block, *_, head = layered.layers
    assert block.rules
    assert not embedding.rules
    assert not head.rules
