"""Tiny stock models of each family, as configurations, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from galvatron.core.spec import Training
from galvatron.families.build import build_meta

__all__ = ["CAUSAL", "CONFIGS", "batches", "noise", "stock_model"]

CONFIGS: dict[str, Callable[[], Any]] = {
    "bert": partial(
        AutoConfig.for_model,
        "bert",
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=16,
    ),
    "bert-untied": partial(
        AutoConfig.for_model,
        "bert",
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    ),
    "gpt2": partial(
        AutoConfig.for_model,
        "gpt2",
        vocab_size=40,
        n_embd=16,
        n_layer=3,
        n_head=4,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "llama": partial(
        AutoConfig.for_model,
        "llama",
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    ),
    "llama-tied": partial(
        AutoConfig.for_model,
        "llama",
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    ),
    "t5": partial(
        AutoConfig.for_model,
        "t5",
        vocab_size=40,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "t5-unscaled": partial(
        AutoConfig.for_model,
        "t5",
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    ),
    "vit": partial(
        AutoConfig.for_model,
        "vit",
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=24,
        image_size=[16, 8],
        patch_size=4,
        num_labels=7,
    ),
    # 30 pixels make 15 tokens a side, then 8, then 4: windows and merges pad.
    "swin": partial(
        AutoConfig.for_model,
        "swin",
        image_size=30,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1, 2],
        num_heads=[2, 2, 4],
        window_size=3,
        num_labels=7,
    ),
}
CAUSAL = ("gpt2", "llama", "llama-tied")


def noise(model: torch.nn.Module) -> None:
    """Fill what initialisation leaves at zero or one, so that errors in norms, biases and tables would show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def stock_model(name: str, attention: str) -> Any:
    """The stock model in fp64, without dropout."""
    empty: Any = build_meta(CONFIGS[name](), Training(dropout=False))
    torch.manual_seed(0)
    model = type(empty)._from_config(empty.config, attn_implementation=attention, dtype=torch.float64)
    noise(model)
    return model


def batches(layered: Any) -> dict[str, dict[str, Tensor]]:
    """A plain batch; for texts also one with padding and ignored labels."""
    generator = torch.Generator().manual_seed(0)
    images = "pixel_values" in layered.layers[0].inputs
    batch = layered.example(4, None if images else 12, generator)
    batch = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    found = {"plain": batch}
    if not images:
        mask, labels = torch.ones_like(batch["input_ids"]), batch["labels"].clone()
        mask[0, 8:], mask[2, 5:] = 0, 0
        labels[:, 3], labels[0, 8:] = -100, -100
        found["padded"] = {**batch, "attention_mask": mask, "labels": labels}
    return found
