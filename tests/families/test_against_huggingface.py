"""Parameters and work of Hugging Face's own models, counted by torch, against the zoo's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from galvatron.core.spec.model import Attention, Training
from galvatron.families import load_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bert": ("BertForMaskedLM", lambda: transformers.BertConfig()),
    "bert-untied": ("BertForMaskedLM", lambda: transformers.BertConfig(tie_word_embeddings=False, type_vocab_size=3)),
    "gpt2": ("GPT2LMHeadModel", lambda: transformers.GPT2Config()),
    "gpt2-odd": (
        "GPT2LMHeadModel",
        lambda: transformers.GPT2Config(n_inner=1000, vocab_size=999, tie_word_embeddings=False, n_positions=77),
    ),
    "gpt3-175b": ("GPT2LMHeadModel", lambda: transformers.GPT2Config(n_embd=12288, n_layer=96, n_head=96)),
    "llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(num_key_value_heads=8, num_hidden_layers=3)),
    "llama-odd": (
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(
            hidden_size=512,
            num_hidden_layers=2,
            num_attention_heads=8,
            head_dim=32,
            num_key_value_heads=2,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "t5": ("T5ForConditionalGeneration", lambda: transformers.T5Config()),
    "t5-gated": (
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(
            feed_forward_proj="gated-gelu", num_decoder_layers=3, d_kv=32, relative_attention_num_buckets=20
        ),
    ),
    "vit": ("ViTForImageClassification", lambda: transformers.ViTConfig(num_labels=1000)),
    "vit-odd": (
        "ViTForImageClassification",
        lambda: transformers.ViTConfig(
            image_size=[96, 64], patch_size=[16, 8], qkv_bias=False, num_channels=1, num_hidden_layers=2
        ),
    ),
    "swin": ("SwinForImageClassification", lambda: transformers.SwinConfig(num_labels=1000)),
    "swin-odd": (
        "SwinForImageClassification",
        # 100 pixels are 25 tokens a side: windows, patches and merges all pad.
        lambda: transformers.SwinConfig(
            image_size=100, depths=[1, 2], num_heads=[2, 3], mlp_ratio=2.5, use_absolute_embeddings=True, qkv_bias=False
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name: str, tmp_path: Path) -> None:
    kind, configure = MODELS[name]
    config = configure()
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
        model.tie_weights()
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert load_model(tmp_path, Training()).parameters == counted


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt3-175b"])
def test_operations_of_a_forward_pass(name: str, tmp_path: Path) -> None:
    """All matrix products and convolutions torch dispatches, on the meta device; eager attention counts full maps."""
    from torch.utils.flop_counter import FlopCounterMode

    kind, configure = MODELS[name]
    config = configure()
    config._attn_implementation = "eager"
    config.use_cache = False
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
        ids = torch.zeros(1, 64, dtype=torch.long)
        sides = config.image_size if hasattr(config, "image_size") else None
        if sides is None:
            inputs = {"input_ids": ids}
            if kind == "T5ForConditionalGeneration":
                inputs["decoder_input_ids"] = ids
            elif kind != "BertForMaskedLM":  # causal models look into the ids for packed samples if there is no mask
                inputs["attention_mask"] = torch.ones_like(ids)
        else:
            height, width = sides if isinstance(sides, list | tuple) else (sides, sides)
            inputs = {"pixel_values": torch.zeros(1, config.num_channels, height, width)}
        with FlopCounterMode(display=False) as counter:
            model(**inputs)
    length = None if sides is not None else 64
    spec = load_model(tmp_path, Training(attention=Attention.EAGER, sequence_length=length))
    assert spec.forward_flops == counter.get_total_flops()
