"""Models without an adapter: cut by their repeated blocks, they compute what they computed whole."""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from longer import longer
from stock_models import noise
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Attention, Training
from galvatron.families.build import build_meta
from galvatron.families.generic.adapter import Generic
from galvatron.families.layer import IGNORED, LayeredModel
from galvatron.families.registry import layered_model
from galvatron.families.saved import SavedWeights
from galvatron.families.tiny import tiny_config
from galvatron.families.weights import InitialWeights, ModelWeights

_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}
_MODELS = {
    "MistralForCausalLM": partial(
        AutoConfig.for_model, "mistral", **_SIZES, num_key_value_heads=2, sliding_window=4, head_dim=4
    ),
    "Qwen2ForCausalLM": partial(
        AutoConfig.for_model, "qwen2", **_SIZES, num_key_value_heads=2, tie_word_embeddings=True
    ),
    # Blocks alternate between two masks.
    "Gemma3ForCausalLM": partial(
        AutoConfig.for_model, "gemma3_text", **_SIZES, num_key_value_heads=2, head_dim=4, sliding_window=4
    ),
    "GPTNeoXForCausalLM": partial(AutoConfig.for_model, "gpt_neox", **_SIZES),
    # Its blocks have buffers of their own.
    "GPTJForCausalLM": partial(
        AutoConfig.for_model,
        "gptj",
        vocab_size=50,
        n_embd=16,
        n_layer=3,
        n_head=4,
        rotary_dim=4,
        n_positions=20,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "OPTForCausalLM": partial(
        AutoConfig.for_model, "opt", **{**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.1}
    ),
    "RobertaForMaskedLM": partial(AutoConfig.for_model, "roberta", **_SIZES),
    "ElectraForMaskedLM": partial(AutoConfig.for_model, "electra", **_SIZES, embedding_size=8),
    "DistilBertForMaskedLM": partial(
        AutoConfig.for_model,
        "distilbert",
        vocab_size=50,
        dim=16,
        n_layers=3,
        n_heads=4,
        hidden_dim=24,
        max_position_embeddings=20,
    ),
    "BertForSequenceClassification": partial(AutoConfig.for_model, "bert", **_SIZES, num_labels=3),
    "DeiTForImageClassification": partial(
        AutoConfig.for_model,
        "deit",
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=24,
        image_size=16,
        patch_size=4,
        num_labels=5,
    ),
}


def _make(name: str, config: Any) -> Any:
    return getattr(transformers, name)(config)


def _empty(name: str) -> Any:
    config = _MODELS[name]()
    config.architectures = [name]
    attention = Attention.FUSED if getattr(transformers, name)._supports_sdpa else Attention.EAGER
    built: Any = build_meta(config, Training(dropout=False, attention=attention))
    # BERT's model type means its pre-training head.
    return built if type(built).__name__ == name else _make(name, built.config)


def _stock(name: str) -> Any:
    empty = _empty(name)
    torch.manual_seed(0)
    model = type(empty)._from_config(empty.config, dtype=torch.float64)
    noise(model)
    return model


def _loss(layered: LayeredModel, batch: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    activations: tuple[Tensor, ...] = ()
    for layer in layered.layers:
        seen = {name: tensor for name, tensor in batch.items() if name in layer.inputs}
        activations = layer(activations, layered.context(seen, dtype))
    return activations[0] / layered.targets(batch)


def _whole_loss(model: Any, batch: dict[str, Tensor], shifted: bool) -> Tensor:
    output = model(**{name: own for name, own in batch.items() if name != "labels"})
    logits, labels = getattr(output, "logits", output), batch["labels"]
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.flatten())


def _assert_equal(
    model: Any, batch: dict[str, Tensor], shifted: bool, example: dict[str, Tensor] | None = None
) -> None:
    reference = copy.deepcopy(model)
    layered = layered_model(model, example)
    expected = _whole_loss(reference, batch, shifted)
    loss = _loss(layered, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    torch.autograd.backward(expected)
    torch.autograd.backward(loss)
    found, wanted = (
        {name: own.grad for name, own in whole.named_parameters() if own.grad is not None}
        for whole in (model, reference)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


_SHORT = ("MistralForCausalLM", "GPTNeoXForCausalLM", "RobertaForMaskedLM", "DeiTForImageClassification")
"""What ``make test`` has of them: a causal one, parallel residuals, a mask of its own, images."""


@pytest.mark.parametrize("name", [own if own in _SHORT else longer(own) for own in _MODELS])
def test_stock_families_without_an_adapter(name: str) -> None:
    model = _stock(name)
    layered = Generic(model)
    assert [layer.kind for layer in layered.layers] == ["embedding", *["block"] * 3, "head"]
    images = "pixel_values" in layered.required
    batch = layered.example(4, None if images else 12, torch.Generator().manual_seed(1))
    batch = {key: own.double() if own.is_floating_point() else own for key, own in batch.items()}
    shifted = name.endswith("CausalLM")
    _assert_equal(model, batch, shifted)
    if not images:
        mask = torch.ones_like(batch["input_ids"])
        mask[1, 9:] = 0
        model.zero_grad()
        _assert_equal(model, {**batch, "attention_mask": mask}, shifted)


def test_experts() -> None:
    """Blocks that look at values cannot run on the meta device; and fused experts know no fp64."""
    config = AutoConfig.for_model("mixtral", **_SIZES, num_key_value_heads=2, num_local_experts=4)
    model = _make("MixtralForCausalLM", config)
    layered = Generic(model)
    batch = layered.example(4, 12, torch.Generator().manual_seed(1))
    torch.testing.assert_close(_loss(layered, batch, torch.float32), _whole_loss(model, batch, shifted=True))


class _Plain(nn.Module):
    """A language model in plain torch, with parameters of its own around the encoder."""

    def __init__(self, skip: bool = False, outside: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.positions = nn.Parameter(0.02 * torch.randn(20, 16))
        block = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.ones(16))
        self.out = nn.Linear(16, 50)
        self.skip, self.outside = skip, outside

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.positions[: tokens.shape[1]]
        made = self.encoder(hidden) * self.scale
        if self.skip:
            made = made + hidden
        if self.outside:
            return functional.linear(made, self.words.weight)
        logits: Tensor = self.out(made)
        return logits


def _plain_batch() -> dict[str, Tensor]:
    tokens = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "labels": tokens.flip(1)}


def test_plain_torch_model() -> None:
    model = _Plain().double()
    batch = _plain_batch()
    _assert_equal(model, batch, shifted=False, example=batch)
    first, *_, last = layered_model(model, batch).layers
    assert [stock for _, stock, _ in first.stock_parameters()] == ["positions", "words.weight"]
    assert [stock for _, stock, _ in last.stock_parameters()] == ["scale", "out.weight", "out.bias"]


@pytest.mark.parametrize(
    ("name", "kind", "options", "shifted"),
    [
        ("BartForCausalLM", "bart", {"d_model": 16, "decoder_layers": 3, "decoder_attention_heads": 4}, False),
        ("ImageGPTForCausalImageModeling", "imagegpt", {"n_embd": 16, "n_layer": 3, "n_head": 4}, True),
        ("BertLMHeadModel", "bert", {**_SIZES, "is_decoder": True}, True),
        ("BertForTokenClassification", "bert", {**_SIZES, "num_labels": 3}, False),
    ],
)  # fmt: skip
def test_loss_is_the_models_own(name: str, kind: str, options: dict[str, Any], shifted: bool) -> None:
    """Whatever its class is called: a decoder that compares labels as they are, an image model that shifts them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{"vocab_size": 50, **options})
    model = _make(name, config).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(40, (4, 12), generator=generator)
    classes = 3 if "Classification" in name else 40
    batch = {"input_ids": ids, "labels": torch.randint(classes, (4, 12), generator=generator)}
    batch["labels"][0, 3] = IGNORED
    layered = layered_model(model, batch)
    expected = model(**batch).loss
    torch.testing.assert_close(_loss(layered, batch, torch.float32), expected)
    reading = (batch["labels"][:, 1:] if shifted else batch["labels"]) != IGNORED
    assert layered.targets(batch) == int(reading.sum())


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("BertForSequenceClassification", {"num_labels": 1}, "its own loss of a trial batch is"),
        ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}, "its own loss"),
    ],
)
def test_a_loss_that_is_another_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    model = _make(name, AutoConfig.for_model("bert", **_SIZES, **options))
    with pytest.raises(InvalidInput, match=reason):
        layered_model(model)


def _mixtral() -> Any:
    sizes = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    return _make("MixtralForCausalLM", AutoConfig.for_model("mixtral", **_SIZES, **sizes))


def test_another_term_for_the_balance_of_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not linear in the probabilities; and any beside a loss of one's own."""
    model = _mixtral()
    with pytest.raises(InvalidInput, match="balance of experts, which a loss function of your own does not get"):
        layered_model(model, loss=lambda output, batch: output.logits.sum())
    module = sys.modules[type(model).__module__]
    usual = vars(module)["load_balancing_loss_func"]
    monkeypatch.setattr(module, "load_balancing_loss_func", lambda *args: usual(*args) ** 2)
    with pytest.raises(InvalidInput, match=r"balance of experts, which changes by .*; such a term is not known"):
        layered_model(model)


def test_a_loss_that_the_user_replaced_is_refused() -> None:
    model = _make("MistralForCausalLM", _MODELS["MistralForCausalLM"]())
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    with pytest.raises(InvalidInput, match="its own loss of a trial batch is"):
        layered_model(model)


def test_loss_of_ones_own() -> None:
    model, batch = _Plain().double(), _plain_batch()
    layered = layered_model(model, batch, lambda output, given: (output.argmax(-1) == given["labels"]).double().sum())
    expected = (model(batch["tokens"]).argmax(-1) == batch["labels"]).double().mean()
    torch.testing.assert_close(_loss(layered, batch), expected)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: _Plain(skip=True), "uses more of what precedes than the hidden state"),
        (lambda: _Plain(outside=True), "a weight of words is used outside of it"),
        (lambda: nn.Linear(2, 2), "no nn.ModuleList"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: Any, reason: str) -> None:
    batch = _plain_batch()
    with pytest.raises(InvalidInput, match=reason):
        layered_model(model(), {**batch, "input": torch.zeros(4, 2)})


def test_stock_models_that_cannot_be_cut() -> None:
    albert = _make("AlbertForMaskedLM", AutoConfig.for_model("albert", **_SIZES, embedding_size=8))
    with pytest.raises(InvalidInput, match="do not run once each in order"):
        layered_model(albert)
    with pytest.raises(InvalidInput, match="give an example batch"):
        layered_model(_Plain())


def test_blocks_of_different_widths_are_refused() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.Linear(2, 4), nn.Linear(4, 8)])

        def forward(self, pixels: Tensor) -> Tensor:
            for stage in self.stages:
                pixels = stage(pixels)
            return functional.linear(pixels, torch.ones(3, 8))

    with pytest.raises(InvalidInput, match="the trial run failed with RuntimeError: mat1 and mat2"):
        layered_model(Stages(), {"pixels": torch.zeros(2, 2), "labels": torch.zeros(2, dtype=torch.long)})


def test_arguments_made_with_weights_are_refused() -> None:
    class Inner(nn.Module):
        def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
            return hidden + table

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 16)
            self.blocks = nn.ModuleList([Inner(), Inner()])

        def forward(self, tokens: Tensor) -> Tensor:
            table: Tensor = self.table(tokens)
            hidden = table
            for block in self.blocks:
                hidden = block(hidden, table=table)
            return hidden

    with pytest.raises(InvalidInput, match="argument 'table' of its modules is computed with weights"):
        layered_model(Outer(), _plain_batch())


def test_stages_need_no_weights_of_others() -> None:
    """What blocks share is made on every stage from the batch alone, here by a model that has no weights at all."""
    empty, full = Generic(_empty("MistralForCausalLM")), Generic(_stock("MistralForCausalLM"))
    batch = full.example(2, 12, torch.Generator().manual_seed(0))
    found, expected = (model.context(batch, torch.float64).calls for model in (empty, full))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours.kwargs["position_embeddings"], theirs.kwargs["position_embeddings"])
        assert torch.equal(ours.kwargs["attention_mask"], theirs.kwargs["attention_mask"])
    assert empty.carried(1, {"input_ids": (12,), "labels": (12,)}) == ((12, 16),)


def test_weights_of_a_model_without_an_adapter(tmp_path: Path) -> None:
    name = "Qwen2ForCausalLM"
    model = _stock(name).float()
    model.save_pretrained(tmp_path)
    empty = layered_model(_empty(name))
    saved, memory, initial = SavedWeights(empty, tmp_path), ModelWeights(empty, model), InitialWeights(empty, seed=0)
    for index, layer in enumerate(empty.layers):
        torch.testing.assert_close(saved.tensors(index), memory.tensors(index), rtol=0, atol=0)
        assert initial.tensors(index).keys() == {key for key, _ in layer.named_parameters()}
    (tie,) = empty.ties
    assert [empty.layers[use.layer].stock_name(use.name) for use in tie.uses] == [
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]


def test_plain_layers_start_as_torch_does() -> None:
    model, batch = _Plain(), _plain_batch()
    initial = InitialWeights(layered_model(model, batch), seed=0)
    found, bound = initial.tensors(1)["block.linear1.weight"], 16**-0.5
    assert bound / 2 < found.abs().max() <= bound
    with pytest.raises(InvalidInput, match="no rule to initialise positions"):
        initial.tensors(0)


def test_blocks_that_return_something_else_are_refused() -> None:
    model = _make("SqueezeBertForMaskedLM", AutoConfig.for_model("squeezebert", **_SIZES, embedding_size=16))
    with pytest.raises(InvalidInput, match="its modules return a dict instead of a hidden state"):
        layered_model(model)


def test_images_of_models_that_say_no_size() -> None:
    """The size of images is in another place, or nowhere."""
    config = AutoConfig.for_model("siglip")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config.vision_config = type(config.vision_config)(**sizes, image_size=32, patch_size=8)
    batch = layered_model(_make("SiglipForImageClassification", config)).example(1, None, torch.Generator())
    assert batch["pixel_values"].shape == (1, 3, 32, 32)
    config = AutoConfig.for_model("poolformer", hidden_sizes=[8, 8], depths=[1, 1], num_encoder_blocks=2)
    with pytest.raises(InvalidInput, match="PoolFormerForImageClassification: cannot be cut into layers"):
        layered_model(_make("PoolFormerForImageClassification", config))


def test_statistics_of_batches_are_refused() -> None:
    """Under any strategy a rank would see other rows together than one process does."""
    config = AutoConfig.for_model("resnet", hidden_sizes=[8, 8], depths=[1, 1], embedding_size=8)
    with pytest.raises(InvalidInput, match=r"ResNetForImageClassification: .*normalization is a BatchNorm2d"):
        layered_model(_make("ResNetForImageClassification", config))


def test_blocks_that_change_the_shape_are_refused() -> None:
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.MaxPool1d(2)])

        def forward(self, pixels: Tensor) -> Tensor:
            for stage in self.stages:
                pixels = stage(pixels)
            return pixels

    with pytest.raises(InvalidInput, match=r"change the shape of the hidden state, from \[2, 8\] to \[2, 4\]"):
        layered_model(Halving(), {"pixels": torch.zeros(2, 8), "labels": torch.zeros(2, dtype=torch.long)})


class _TwoSenses(_Plain):
    """Reads tokens, and images where there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 16)

    def forward(self, tokens: Tensor, pixels: Tensor | None = None) -> Tensor:
        seen: Tensor = super().forward(tokens)
        return seen if pixels is None else seen + self.tower(pixels).sum()


def test_what_a_batch_does_not_use_is_kept_but_not_trained() -> None:
    """In one process it has no gradient, so that no optimizer decays it; and it must be in checkpoints."""
    model, batch = _TwoSenses(), _plain_batch()
    layered = layered_model(model, batch)
    held = {layer.stock_name(name): own for layer in layered.layers for name, own in layer.named_parameters()}
    assert held.keys() == dict(model.named_parameters()).keys()
    assert [name for name, own in held.items() if not own.requires_grad] == ["tower.weight", "tower.bias"]
    with pytest.raises(InvalidInput, match="the batch has pixels, for which tower may be needed"):
        layered.context({**batch, "pixels": torch.zeros(4, 3)}, torch.float32)


def test_a_model_that_changes_itself_is_refused() -> None:
    """Short sequences make BigBird replace its blocks' attention, which blocks that run alone would not know of."""
    config = AutoConfig.for_model("big_bird", **_SIZES, attention_type="block_sparse", block_size=4)
    with pytest.raises(InvalidInput, match="forward replaces parts of them, depending on the batch"):
        layered_model(_make("BigBirdForMaskedLM", config))


def test_who_reads_a_weight() -> None:
    """MobileBERT's head multiplies by its decoder's weight without calling the decoder: a tied weight must be there
    while the head runs."""
    config = tiny_config(AutoConfig.for_model("mobilebert", num_hidden_layers=2))
    layered = layered_model(_make("MobileBertForMaskedLM", config))
    (tie,) = layered.ties
    head = layered.layers[-1]
    path = next(use.name for use in tie.uses if layered.layers[use.layer] is head).rpartition(".")[0]
    assert head.caller(path) is layered.model.get_submodule("cls.predictions")
    assert head.caller(path) is not head.get_submodule(path)


@pytest.mark.parametrize(
    ("kind", "name", "options", "reason"),
    [
        ("opt", "OPTForCausalLM", {"layerdrop": 0.1}, "layerdrop of its configuration is 0.1, so it leaves out blocks"),
        ("mistral", "MistralForCausalLM", {"expert_capacity": 4}, "expert_capacity of its configuration is 4"),
    ],
)
def test_what_depends_on_how_a_batch_is_divided_is_refused(
    kind: str, name: str, options: dict[str, Any], reason: str
) -> None:
    """Blocks left out at random, and experts with room for so many tokens of a batch."""
    config = AutoConfig.for_model(kind, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **options)
    with pytest.raises(InvalidInput, match=reason):
        Generic(_make(name, config))
