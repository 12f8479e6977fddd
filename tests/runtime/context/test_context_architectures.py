"""Models of no known family: those whose sequences can be divided train as in one process, the others are named."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from longer import longer
from ranks import ranks

from galvatron.core.spec import Attention, Training
from galvatron.families.build import build_meta, without_weights
from galvatron.families.registry import layered_model
from galvatron.runtime.unpriced import facts_of, unpriced
from galvatron.runtime.verify import difference

_SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}  # fmt: skip
_DIVIDED: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"model_type": "qwen2", **_GROUPED, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"model_type": "qwen3", **_GROUPED},
    "MixtralForCausalLM": {"model_type": "mixtral", **_GROUPED, "sliding_window": None, "num_local_experts": 4},
    "GPTNeoXForCausalLM": {"model_type": "gpt_neox", **_SMALL},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3", **_SMALL, "num_key_value_heads": 4, **_LATENT},
    "OlmoForCausalLM": {"model_type": "olmo", **_GROUPED},
    "GemmaForCausalLM": {"model_type": "gemma", **_GROUPED, "head_dim": 16},
}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "MistralForCausalLM": ({"model_type": "mistral", **_GROUPED}, "a sliding window"),
    "Gemma2ForCausalLM": ({"model_type": "gemma2", **_GROUPED, "head_dim": 16}, "a soft cap|a sliding window"),
    "RobertaForMaskedLM": ({"model_type": "roberta", **_SMALL, "max_position_embeddings": 64}, "count positions"),
    "MambaForCausalLM": ({"model_type": "mamba", **_SMALL}, "position_ids"),
    "BloomForCausalLM": ({"model_type": "bloom", **_SMALL, "n_layer": 2, "n_head": 4}, "position_ids"),
    "BertForSequenceClassification": ({"model_type": "bert", **_SMALL}, "label"),
    "GptOssForCausalLM": (
        {"model_type": "gpt_oss", **_GROUPED, "num_local_experts": 4, "head_dim": 16},
        "sinks|window",
    ),
}


@cache
def _made(text: str) -> Any:
    return build_meta(json.loads(text), Training(dropout=False, attention=Attention.FUSED), as_named=True)


def _difference(text: str, stages: list[list[str]]) -> str | None:
    """On a rank: what differs from one process."""
    model = _made(text)
    facts = facts_of(layered_model(without_weights(model)), Training(dropout=False), "model")
    return difference(model, unpriced(facts, stages), device=torch.device("cpu"))


@pytest.mark.parametrize("name", [own if own == "Qwen3ForCausalLM" else longer(own) for own in _DIVIDED])
def test_divided(name: str) -> None:
    text = json.dumps({**_DIVIDED[name], "architectures": [name]})
    stages = [["ring2-ulysses2", "ring4", "dp2-ulysses2", "ring2-ulysses2"]]
    assert set(ranks(4).run(_difference, text, stages)) == {None}


@pytest.mark.parametrize("name", [own if own == "MistralForCausalLM" else longer(own) for own in _REFUSED])
def test_refused(name: str) -> None:
    config, reason = _REFUSED[name]
    layered = layered_model(without_weights(_made(json.dumps({**config, "architectures": [name]}))))
    found = [layered.why_undivided(index) for index in range(len(layered.layers))]
    assert all(own is not None for own in found[1:-1])
    assert any(word in str(found[1]) for word in reason.split("|")), found[1]
