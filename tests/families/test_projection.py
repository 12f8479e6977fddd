"""Which stock heads may be fused with the loss: those whose projection makes the very logits."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from galvatron.families.generic.adapter import Generic

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 67,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    ("kind", "projection", "options"),
    [
        ("qwen3", "lm_head", {}),
        ("granite", None, {"logits_scaling": 8.0}),  # divided by it
        ("cohere", None, {}),  # scaled
        ("gemma2", None, {}),  # capped
    ],
)
def test_the_logits_are_what_the_projection_made(kind: str, projection: str | None, options: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind, **_SIZES, **options)
    model: Any = AutoModelForCausalLM.from_config(config)
    assert Generic(model).layers[-1].projection == projection
