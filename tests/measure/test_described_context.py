"""How sequences can be divided, as counted for known families and as found by running others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from longer import longer
from torch import nn

from galvatron.core.spec import Context, ModelSpec, Precision, Training
from galvatron.families import load_model
from galvatron.measure import contexts
from galvatron.measure.describe import describe

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _described(name: str, attention: str = "sdpa", precision: Precision = Precision.BF16, **changes: Any) -> ModelSpec:
    config = getattr(transformers, f"{name}Config")(**_SMALL | changes)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation=attention)
    ids = torch.zeros((1, 32), dtype=torch.long)
    return describe(model, {"input_ids": ids, "labels": ids}, Training(precision=precision))


def _contexts(spec: ModelSpec) -> list[Context | None]:
    return [kind.context for kind in spec.kinds]


def test_what_running_a_llama_finds_is_what_is_counted() -> None:
    config = transformers.LlamaConfig(**_SMALL).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    counted = load_model(config, Training(precision=Precision.BF16, sequence_length=32))
    assert _contexts(_described("Llama")) == _contexts(counted)
    decoder = counted.kinds[1].context
    assert decoder is not None
    assert (decoder.heads, decoder.key_value_heads, decoder.causal, decoder.ring) == (4, 2, True, True)
    assert (decoder.query_bytes, decoder.key_value_bytes) == (32 * 64 * 2, 2 * 32 * 32 * 2)


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-xl", "bert-large"])
def test_attention_is_what_grows_with_the_square(model: str) -> None:
    """Of a layer's operations, what two samples of half the length do not do: independent of how it is counted."""
    whole, half = (
        load_model(model, Training(precision=Precision.BF16, sequence_length=length)).kinds[1] for length in (512, 256)
    )
    assert whole.context is not None
    assert whole.context.attention_flops == 2 * (whole.forward_flops - 2 * half.forward_flops)


@pytest.mark.slow
def test_dropout_of_attention_is_found() -> None:
    spec = _described("Llama", attention_dropout=0.1)
    assert [own is not None and own.ring for own in _contexts(spec)] == [True, False, True]


def test_dropout_of_attention_rules_out_the_ring() -> None:
    known = load_model("gpt2", Training())
    assert [own is not None and own.ring for own in _contexts(known)] == [True, False, True]
    without = load_model("gpt2", replace(Training(), dropout=False))
    assert all(own is not None and own.ring for own in _contexts(without))


@pytest.mark.slow
def test_experts_follow_their_tokens() -> None:
    spec = _described("Mixtral", num_local_experts=4, sliding_window=None)
    assert all(own is not None for own in _contexts(spec))
    assert spec.kinds[1].experts is not None


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Mistral", {"sliding_window": 16}),
        longer("Gemma2", {"head_dim": 16}),  # soft caps
        longer("GptOss", {"head_dim": 16, "num_local_experts": 4, "precision": Precision.FP32}),  # sinks
        longer("Mamba", {"state_size": 4}),
        longer("Mixtral", {"num_local_experts": 4, "sliding_window": None, "output_router_logits": True}),
    ],
)
def test_what_nobody_knows_how_to_divide_is_not_divided(name: str, changes: dict[str, Any]) -> None:
    spec = _described(name, "eager", **changes)
    blocks = [kind.context for kind in spec.kinds if kind.name not in ("embedding", "head")]
    assert blocks
    assert all(own is None for own in blocks)


@pytest.mark.slow
def test_long_samples_that_are_not_divided_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = "MistralForCausalLM: long samples are not divided over devices in all its layers, because"
    _described("Mistral", "eager", sliding_window=16)
    assert said not in caplog.text, "32 tokens are not long"
    monkeypatch.setattr(contexts, "LONG_SEQUENCE", 32)
    _described("Mistral", "eager", sliding_window=None)
    assert said not in caplog.text
    _described("Mistral", "eager", sliding_window=16)
    assert f"{said} MistralDecoderLayer: its attention has a sliding window" in caplog.text


@pytest.mark.parametrize("model", ["t5-large-32", "swin-huge-32", "vit-huge-32"])
def test_families_that_are_not_divided(model: str) -> None:
    assert not load_model(model, Training()).divisible
