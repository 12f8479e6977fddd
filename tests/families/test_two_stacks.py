"""Models with an encoder and a decoder, without an adapter: cut between their two lists of blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from longer import longer
from torch import Tensor, nn
from transformers import AutoConfig

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Attention, Training
from galvatron.families.generic import decoder_inputs
from galvatron.families.layer import IGNORED, LayeredModel
from galvatron.families.registry import layered_model
from galvatron.families.tiny import TINY_TOKENS, tiny_config
from galvatron.families.weights import parameters_of
from galvatron.runtime.trial import random_model

_LAYERS = {"encoder_layers": 2, "decoder_layers": 2}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BartForConditionalGeneration": ("bart", _LAYERS),
    "MBartForConditionalGeneration": ("mbart", _LAYERS),  # starts its decoder with the last token of the labels
    "WhisperForConditionalGeneration": ("whisper", _LAYERS),
    "UMT5ForConditionalGeneration": ("umt5", {"num_layers": 2, "num_decoder_layers": 2}),
}
_MORE = ("BartForConditionalGeneration", "WhisperForConditionalGeneration")
"""Left to the longer run; Bart trains in ``tests/runtime/test_encoder_decoder.py``."""


def _model(name: str) -> Any:
    kind, options = _MODELS[name]
    config = tiny_config(AutoConfig.for_model(kind, **options), degree=2)
    return random_model(getattr(transformers, name), config, Training(attention=Attention.EAGER))


def _batch(layered: LayeredModel) -> dict[str, Tensor]:
    """The target is longer than the source, and some labels do not count."""
    drawn = layered.example(3, 9, torch.Generator().manual_seed(1))
    labels = torch.randint(TINY_TOKENS, (3, 11), generator=torch.Generator().manual_seed(2))
    labels[0, 7:] = IGNORED
    batch = {**drawn, "labels": labels}
    if "input_ids" in batch:
        batch["input_ids"] = batch["input_ids"] % TINY_TOKENS
        batch["attention_mask"] = torch.ones(3, 9, dtype=torch.long)
        batch["attention_mask"][1, 6:] = 0
    return batch


def _loss(layered: LayeredModel, batch: dict[str, Tensor]) -> Tensor:
    activations: tuple[Tensor, ...] = ()
    for layer in layered.layers:
        seen = {name: own for name, own in batch.items() if name in layer.inputs}
        activations = layer(activations, layered.context(seen, torch.float32))
    return activations[0] / layered.targets(batch)


@pytest.mark.parametrize("name", [longer(own) if own in _MORE else own for own in _MODELS])
def test_computes_what_the_stock_model_does(name: str) -> None:
    model = _model(name)
    layered = layered_model(model)
    assert [layer.kind for layer in layered.layers] == [
        "embedding", "encoder", "encoder", "bridge", "decoder", "decoder", "head"
    ]  # fmt: skip
    batch = _batch(layered)
    expected = model(**batch).loss
    trained = {name: own for name, own in model.named_parameters() if own.requires_grad}
    wanted = torch.autograd.grad(expected, list(trained.values()), allow_unused=True)
    loss = _loss(layered, batch)
    torch.testing.assert_close(loss, expected)
    torch.autograd.backward(loss)
    for (own, parameter), gradient in zip(trained.items(), wanted, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, msg=own, rtol=1e-4, atol=1e-6)


def test_two_tensors_travel_in_the_decoder() -> None:
    model = _model("WhisperForConditionalGeneration")
    layered = layered_model(model)
    batch = _batch(layered)
    assert batch["input_features"].shape == (3, 80, 2 * 64)  # two frames for each of the tiny copy's positions
    samples = {name: tuple(own.shape[1:]) for name, own in batch.items()}
    source, target = (64, 32), (11, 32)
    carried = [layered.carried(index, samples) for index in range(1, 7)]
    assert carried == [(source,)] * 3 + [(target, source)] * 3


def test_a_shared_embedding_is_trained_and_saved_once() -> None:
    """No layer has the module that encoder and decoder share, but its name is that of the weight in checkpoints."""
    layered = layered_model(_model("BartForConditionalGeneration"))
    (tie,) = layered.ties
    assert [use.layer for use in tie.uses] == [0, 3, 6]
    assert {layered.layers[use.layer].stock_name(use.name) for use in tie.uses} == {"model.shared.weight"}
    assert all(own.requires_grad for own in layered.model.parameters())
    held = {own.aliases[0] for layer in parameters_of(layered) for own in layer}
    assert held == dict(layered.model.named_parameters()).keys()


def test_what_it_is_to_the_planner() -> None:
    model = _model("BartForConditionalGeneration")
    batch = {name: own[:, :8] for name, own in layered_model(model).example(2, 8, torch.Generator()).items()}
    spec = galvatron.describe(model, batch, Training())
    tensor = 8 * 32 * 4
    assert [(kind.name, kind.boundary_bytes // tensor) for kind in spec.kinds] == [
        ("embedding", 1), ("encoder", 1), ("bridge", 2), ("decoder", 2), ("head", 2)
    ]  # fmt: skip
    count = sum(layer.parameters - layer.tied_parameters for layer in spec.layers)
    assert count == sum(own.numel() for own in model.parameters())
    encoder, decoder = (next(kind for kind in spec.kinds if kind.name == name) for name in ("encoder", "decoder"))
    assert decoder.forward_flops > encoder.forward_flops  # it attends twice


def test_position_biases_that_travel_are_refused() -> None:
    config: Any = tiny_config(AutoConfig.for_model("mt5", num_layers=2, num_decoder_layers=2))
    with pytest.raises(InvalidInput, match="is what the one before returned besides the hidden state"):
        layered_model(transformers.MT5ForConditionalGeneration(config))


@pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")
def test_a_mask_that_is_made_of_labels() -> None:
    """Two models put together: its decoder does not attend to padding, which labels that do not count become."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sides = [AutoConfig.for_model("bert", **sizes, intermediate_size=8) for _ in range(2)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*sides)
    config.decoder_start_token_id, config.pad_token_id = 1, 2
    torch.manual_seed(0)
    model: Any = transformers.EncoderDecoderModel(config)
    model.eval()
    layered = layered_model(model)
    batch = layered.example(3, 9, torch.Generator().manual_seed(1))
    batch["labels"] = batch["labels"].clamp(min=3)
    batch["labels"][0, 4] = IGNORED
    made = layered.context(batch, torch.float32).batch
    assert made["decoder_attention_mask"].tolist()[0] == [1, 1, 1, 1, 1, 0, 1, 1, 1]
    torch.testing.assert_close(_loss(layered, batch), model(**batch).loss)


def test_tokens_before_samples_are_refused() -> None:
    """FSMT's hidden states are (tokens, samples, width): a micro-batch could not be divided by its samples."""
    config: Any = tiny_config(AutoConfig.for_model("fsmt", **_LAYERS, langs=["en", "de"]))
    with pytest.raises(InvalidInput, match=r"have the shape \[8, 2, 32\], in which the 2 samples do not come first"):
        layered_model(transformers.FSMTForConditionalGeneration(config))


def test_decoder_inputs_nobody_can_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that makes other tokens of the labels than the model does is not used."""
    model = _model("BartForConditionalGeneration")
    monkeypatch.setattr(decoder_inputs, "_functions", lambda _: [lambda labels: labels.clamp(min=0)])
    with pytest.raises(InvalidInput, match="how it makes decoder_input_ids from labels is not known"):
        layered_model(model)


class _Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor, *seen: Tensor) -> Tensor:
        made: Tensor = hidden + self.own(hidden).tanh()
        for each in seen:
            made = made + self.other(each).mean(1, keepdim=True)
        return made


class _Plain(nn.Module):
    """Two stacks of no library; ``fault``: what does not fit."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=bool(fault))  # else its decoder might be one large head
        self.source, self.target = nn.Embedding(20, 8), nn.Embedding(20, 8)
        self.down = nn.ModuleList(_Cross() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.up = nn.ModuleList(_Cross() for _ in range(3))
        self.out = nn.Linear(8, 20)
        self.fault = fault

    def forward(self, tokens: Tensor, answer: Tensor) -> Tensor:
        first = hidden = self.source(tokens)
        for block in self.down:
            hidden = block(hidden)
        encoded = self.norm(hidden + first if self.fault == "skip" else hidden)
        hidden = self.target(answer)
        for block in self.up:
            given = encoded * 2 if self.fault == "changed" else encoded
            hidden = block(hidden, given, hidden + 1) if self.fault == "two" else block(hidden, given)
        scores: Tensor = self.out(hidden + encoded.mean(1, keepdim=True) if self.fault == "head" else hidden)
        return scores


def _plain_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"tokens": (4, 6), "answer": (4, 5), "labels": (4, 5)}
    return {name: torch.randint(20, shape, generator=generator) for name, shape in shapes.items()}


def test_plain_torch_model() -> None:
    torch.manual_seed(0)
    model, batch = _Plain(), _plain_batch()
    layered = layered_model(model, batch)
    assert [layer.kind for layer in layered.layers][3:5] == ["bridge", "decoder"]
    logits = model(batch["tokens"], batch["answer"])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(_loss(layered, batch), expected)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("skip", "up use more of what precedes down than the hidden state"),
        ("changed", r"argument 1 of its modules is computed with weights"),
        ("two", r"argument 2 of its modules is computed with weights"),
        ("head", "what follows uses more of what precedes than the hidden state"),
    ],
)
def test_what_cannot_be_cut_is_refused(fault: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=f"down and up .{reason}"):
        layered_model(_Plain(fault), _plain_batch())
