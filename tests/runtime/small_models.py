"""Configurations of tiny stock models, one a family, without dropout."""

from __future__ import annotations

from typing import Any

__all__ = ["IMAGES", "LAYERS", "TOKENS", "config"]

TOKENS = ("bert", "gpt2", "llama", "t5")
IMAGES = ("swin", "vit")
LAYERS = {"bert": 4, "gpt2": 4, "llama": 4, "swin": 7, "t5": 7, "vit": 4}
"""Of the planner's model, with embedding and head."""

_NONE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_CONFIGS: dict[str, dict[str, Any]] = {
    # 67 words: no number of ranks divides them.
    "bert": {
        "vocab_size": 67,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
        **_NONE,
    },
    "gpt2": {
        "vocab_size": 67,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 8,
        "n_positions": 16,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "llama": {
        "vocab_size": 67,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    },
    "t5": {
        "vocab_size": 67,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 4,
        "num_labels": 10,
        **_NONE,
    },
    "swin": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [4, 4],
        "window_size": 4,
        "num_labels": 10,
        "drop_path_rate": 0.0,
        **_NONE,
    },
}


def config(family: str, **changes: Any) -> dict[str, Any]:
    """A family's tiny configuration, some of its fields changed."""
    return {"model_type": family, **_CONFIGS[family], **changes}
