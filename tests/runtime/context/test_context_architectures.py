"""Models of no known family: those whose sequences can be divided train as in one process, the others are named."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from experts_oracle import case, stock
from longer import longer
from ranks import ranks

from galvatron.core.spec import Attention, Training
from galvatron.families import load_model
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
    "Phi3ForCausalLM": {"model_type": "phi3", **_GROUPED, "sliding_window": None, "pad_token_id": 0},
}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "MistralForCausalLM": ({"model_type": "mistral", **_GROUPED}, "a sliding window"),
    "Gemma2ForCausalLM": ({"model_type": "gemma2", **_GROUPED, "head_dim": 16}, "a soft cap|a sliding window"),
    "RobertaForMaskedLM": ({"model_type": "roberta", **_SMALL, "max_position_embeddings": 64}, "count positions"),
    "MambaForCausalLM": ({"model_type": "mamba", **_SMALL}, "position_ids"),
    "BloomForCausalLM": ({"model_type": "bloom", **_SMALL, "n_layer": 2, "n_head": 4}, "position_ids"),
    "Qwen2MoeForCausalLM": (
        {
            "model_type": "qwen2_moe", **_GROUPED, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2,
            "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        },
        "a mask of its model's own",
    ),
    "Phi3ForCausalLM": (
        {
            "model_type": "phi3", **_GROUPED, "sliding_window": None, "pad_token_id": 0,
            "original_max_position_embeddings": 16, "max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        },
        "rope_type 'longrope'",
    ),
    "Llama4ForCausalLM": (
        {
            "model_type": "llama4_text", **_GROUPED, "head_dim": 16, "intermediate_size_mlp": 64,
            "num_local_experts": 2, "attention_chunk_size": 8,
        },
        "positions",
    ),
    "BertForSequenceClassification": ({"model_type": "bert", **_SMALL}, "label"),
    "GptOssForCausalLM": (
        {"model_type": "gpt_oss", **_GROUPED, "num_local_experts": 4, "head_dim": 16},
        "sinks|window",
    ),
}  # fmt: skip


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


@pytest.mark.parametrize("way", ["ulysses2", longer("ring2")])
@pytest.mark.parametrize("name", [own if own == "Phi3ForCausalLM" else longer(own) for own in _DIVIDED])
def test_divided_and_recomputed_in_part(name: str, way: str) -> None:
    """Phi-3 makes queries, keys and values in one product: where values are exchanged, queries are still needed."""
    text = json.dumps({**_DIVIDED[name], "architectures": [name]})
    stages = [[way, f"{way}+rs", f"{way}+ra", way]]
    assert set(ranks(2).run(_difference, text, stages)) == {None}


_LEAN = ("MistralForCausalLM", "Qwen2MoeForCausalLM", "Phi3ForCausalLM")
"""Windows that attention is told of, and that only masks have; frequencies that a part of a sequence would change."""


@pytest.mark.parametrize("name", [own if own in _LEAN else longer(own) for own in _REFUSED])
def test_refused(name: str) -> None:
    config, reason = _REFUSED[name]
    layered = layered_model(without_weights(_made(json.dumps({**config, "architectures": [name]}))))
    found = [layered.why_undivided(index) for index in range(len(layered.layers))]
    assert all(own is not None for own in found[1:-1])
    assert any(word in str(found[1]) for word in reason.split("|")), found[1]


def test_experts_that_run_in_a_loop_are_looked_at_without_it() -> None:
    """A loop over experts needs values, which a trial does not have; the model itself stays as it was."""
    model = stock(case("qwen3_moe", []))
    layered = layered_model(model)
    assert {layered.why_undivided(index) for index in range(len(layered.layers))} == {None}
    assert model.config._experts_implementation == "eager"  # type: ignore[union-attr]


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "linear"])
def test_a_family_whose_frequencies_depend_on_the_length(rope_type: str) -> None:
    """The planner offers no division that the runtime refuses."""
    scaling = {"rope_type": rope_type, "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = {"model_type": "llama", **_GROUPED, "rope_scaling": scaling, "max_position_embeddings": 64}
    layered = layered_model(build_meta(config, Training(dropout=False)))
    reasons = [layered.why_undivided(index) for index in range(len(layered.layers))]
    facts = load_model(config, Training(dropout=False, sequence_length=32))
    if rope_type == "linear":
        assert reasons == [None] * 4
        assert all(layer.context is not None for layer in facts.layers)
    else:
        assert all(f"rope_type {rope_type!r}" in str(reason) for reason in reasons)
        assert all(layer.context is None for layer in facts.layers)


_ROWS_OF_DOCUMENTS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"model_type": "qwen3", **_GROUPED},
    "FalconForCausalLM": {"model_type": "falcon", **_SMALL, "alibi": False, "new_decoder_architecture": False},
    "ElectraForMaskedLM": {"model_type": "electra", **_SMALL, "max_position_embeddings": 64},
}


@pytest.mark.parametrize("name", [own if own != "ElectraForMaskedLM" else longer(own) for own in _ROWS_OF_DOCUMENTS])
def test_documents_are_separate_where_the_stock_model_separates_them(name: str) -> None:
    """In one process: whether another token in the first document of a row changes anything in the second."""
    text = json.dumps({**_ROWS_OF_DOCUMENTS[name], "architectures": [name]})
    layered = layered_model(without_weights(_made(text)))
    model: Any = type(_made(text))._from_config(_made(text).config, attn_implementation="sdpa").eval()
    ids = torch.arange(16)[None] + 5
    places = torch.arange(16)[None] % 8
    found = [
        model(input_ids=own, position_ids=places, **({} if "Masked" in name else {"use_cache": False})).logits[:, 8:]
        for own in (ids, torch.where(torch.arange(16) == 3, 77, ids))
    ]
    assert layered.separates_documents() == torch.equal(*found)
