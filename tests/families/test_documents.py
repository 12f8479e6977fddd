"""Rows of several documents: FlexAttention's block mask gives what the stock model's mask gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import flex_attention

from galvatron.core.spec import Attention, Training
from galvatron.families.build import build_meta
from galvatron.families.documents import attend_by_document, why_by_mask
from galvatron.families.registry import layered_model

_SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 128,
}  # fmt: skip


@torch.no_grad()
def _loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Through our layers, one after the other."""
    layered = layered_model(model)
    context = layered.context(batch, torch.float32)
    activations: tuple[torch.Tensor, ...] = ()
    for layer in layered.layers:
        activations = layer(activations, context)
    return activations[0] / layered.targets(batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch and transformers themselves
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
def test_documents_attend_as_the_mask_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward alone, as it is written: FlexAttention has no backward on CPUs, nor a compiler on all of them."""
    monkeypatch.setattr(flex_attention, "is_torchdynamo_compiling", lambda: True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = LlamaForCausalLM
        model: Any = made._from_config(LlamaConfig(**_SHAPE), attn_implementation="sdpa").eval()
        ids = torch.randint(50, (2, 40))
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((7, 20, 13), (25, 14, 1))])
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}
    masked = _loss(model, batch)
    whole = _loss(model, {**batch, "position_ids": torch.arange(40).expand(2, -1)})
    attend_by_document(model, Training(dropout=False))
    assert model.config._attn_implementation == "flex_attention"
    torch.testing.assert_close(_loss(model, batch), masked, rtol=1e-5, atol=1e-6)
    assert abs(float(masked - whole)) > 1e-4, "documents see each other without it"


def test_what_has_no_block_mask_says_why() -> None:
    plain = Training(dropout=False)
    llama = {"model_type": "llama", **_SHAPE}
    assert why_by_mask(build_meta(llama, plain), plain) is None
    odd = build_meta({**llama, "head_dim": 24}, plain)
    assert "24 wide" in str(why_by_mask(odd, plain))
    eager = replace(plain, attention=Attention.EAGER)
    assert why_by_mask(build_meta(llama, plain), eager) == "attention is eager"
    dropping = build_meta({**llama, "attention_dropout": 0.1}, Training())
    assert why_by_mask(dropping, Training()) == "FlexAttention has no dropout"
    mistral = {**llama, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert "of no known family" in str(why_by_mask(build_meta(mistral, plain), plain))
