"""Tiny configurations build models that run, of architectures whose sizes depend on each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from galvatron.core.spec import Attention, Training
from galvatron.families.generic.adapter import Generic
from galvatron.families.generic.tensor_plan import divides
from galvatron.families.rules import Columns
from galvatron.families.shallow import shallow_config
from galvatron.families.tiny import TINY_TOKENS, tiny_config
from galvatron.runtime.trial import random_model


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("mamba2", "Mamba2ForCausalLM", {}),  # heads of a state space, in groups
        ("bamba", "BambaForCausalLM", {}),
        ("codegen", "CodeGenForCausalLM", {}),  # four heads at least
        ("qwen3_next", "Qwen3NextForCausalLM", {}),  # heads of linear attention
        ("deepseek_v3", "DeepseekV3ForCausalLM", {}),  # heads of two parts
        # … one of them narrower than in a tiny copy.
        ("deepseek_v2", "DeepseekV2ForCausalLM", {"qk_rope_head_dim": 4, "num_experts_per_tok": 2}),
        ("luke", "LukeForMaskedLM", {}),  # a second vocabulary
        ("mobilebert", "MobileBertForMaskedLM", {}),  # narrower embeddings: a projection that must not be empty
    ],
)
def test_it_runs(kind: str, name: str, options: dict[str, Any]) -> None:
    config: Any = AutoConfig.for_model(kind, num_hidden_layers=1, architectures=[name], **options)
    small = tiny_config(config, degree=2)
    model = random_model(getattr(transformers, name), small, Training(attention=Attention.EAGER))
    assert sum(own.numel() for own in model.parameters()) < 200_000
    assert all(own.numel() for own in model.parameters())
    ids = torch.arange(8).view(1, 8) % TINY_TOKENS
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)


def test_widths_of_stages_keep_their_ratio() -> None:
    small: Any = tiny_config(AutoConfig.for_model("swin"), degree=2)
    assert small.num_heads == (4, 8, 16, 32)
    assert small.embed_dim == 4 * 8


def test_heads_can_be_divided() -> None:
    small: Any = tiny_config(AutoConfig.for_model("qwen2", num_attention_heads=14, num_key_value_heads=2), degree=4)
    assert (small.num_attention_heads, small.num_key_value_heads) == (16, 4)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4UnifiedConfig"), reason="a newer transformers has it")
def test_blocks_whose_heads_differ_are_cut_and_split() -> None:
    """Every sixth block of Gemma 4 has wider heads, which its configuration says block by block."""
    config: Any = shallow_config(transformers.Gemma4UnifiedConfig())
    text = config.get_text_config()
    assert text.num_hidden_layers == 6
    assert text.to_dict()["per_layer_config"] == {"5": {"head_dim": 512}}
    training = Training(attention=Attention.EAGER, dropout=False, sequence_length=TINY_TOKENS)
    model = random_model(transformers.Gemma4UnifiedForConditionalGeneration, tiny_config(config, degree=2), training)
    assert Generic(model).tensor_rules.blocks.keys() == {"sliding_attention", "full_attention"}


def test_blocks_with_heads_of_different_numbers_are_not_split() -> None:
    class Config:
        num_attention_heads = 8

        @property
        def num_key_value_heads(self) -> int:
            raise RuntimeError("'num_key_value_heads' is a per-layer attribute")  # as transformers says it

        def get_text_config(self) -> Any:
            return self

    class Split:
        rules = (Columns("self_attn.k_proj"),)

    whole: Any = Split()
    assert set(divides(whole, Config())) == {8, 1}
