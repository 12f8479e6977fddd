"""The models that ``fuzz_training.py`` draws: classes of transformers, small, each with values for fields of its
configuration that are drawn as well."""

from __future__ import annotations

from typing import Any

__all__ = ["DECODERS", "MODELS"]

_TOKENS = {"vocab_size": (61, 64, 67), "num_hidden_layers": (1, 2, 3)}
_LLAMA = {
    **_TOKENS, "hidden_size": (32,), "num_attention_heads": (4, 8), "num_key_value_heads": (2, 4),
    "intermediate_size": (48, 64), "max_position_embeddings": (32,), "tie_word_embeddings": (False, True),
    "hidden_act": ("silu", "gelu"),
}  # fmt: skip
_BERT = {
    **_TOKENS, "hidden_size": (32,), "num_attention_heads": (4, 8), "intermediate_size": (48, 64),
    "max_position_embeddings": (34,), "hidden_act": ("gelu", "relu"),
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "BertForMaskedLM": ("bert", {**_BERT, "tie_word_embeddings": (True, False)}),
    "GPT2LMHeadModel": (
        "gpt2",
        {
            "vocab_size": (61, 67), "n_layer": (1, 2, 3), "n_embd": (32,), "n_head": (4, 8), "n_positions": (32,),
            "activation_function": ("gelu_new", "relu"), "scale_attn_by_inverse_layer_idx": (False, True),
            "tie_word_embeddings": (True, False), "bos_token_id": (0,), "eos_token_id": (0,),
        },
    ),
    "LlamaForCausalLM": ("llama", {**_LLAMA, "attention_bias": (False, True), "mlp_bias": (False, True)}),
    "T5ForConditionalGeneration": (
        "t5",
        {
            "vocab_size": (61, 67), "d_model": (32,), "d_kv": (8,), "d_ff": (48, 64), "num_layers": (1, 2),
            "num_decoder_layers": (1, 2), "num_heads": (4,), "feed_forward_proj": ("relu", "gated-gelu"),
            "pad_token_id": (0,), "decoder_start_token_id": (0,), "tie_word_embeddings": (True, False),
        },
    ),
    "ViTForImageClassification": (
        "vit",
        {
            "hidden_size": (32,), "num_hidden_layers": (1, 2, 3), "num_attention_heads": (4,),
            "intermediate_size": (48, 64), "image_size": (16,), "patch_size": (4, 8), "num_labels": (5, 10),
            "qkv_bias": (True, False),
        },
    ),
    "SwinForImageClassification": (
        "swin",
        {
            "image_size": (32,), "patch_size": (2,), "embed_dim": (16,), "depths": ((2, 2), (1, 2)),
            "num_heads": ((4, 4),), "window_size": (4,), "num_labels": (10,), "qkv_bias": (True, False),
        },
    ),
    "MistralForCausalLM": ("mistral", {**_LLAMA, "sliding_window": (None, 4)}),
    "Qwen2ForCausalLM": ("qwen2", _LLAMA),
    "Qwen3ForCausalLM": ("qwen3", {**_LLAMA, "head_dim": (8,)}),
    "Olmo2ForCausalLM": ("olmo2", _LLAMA),
    "BertForSequenceClassification": ("bert", {**_BERT, "num_labels": (3,)}),
    "RobertaForTokenClassification": ("roberta", {**_BERT, "num_labels": (5,), "pad_token_id": (1,)}),
    "OPTForCausalLM": (
        "opt",
        {
            **_TOKENS, "hidden_size": (32,), "word_embed_proj_dim": (32,), "ffn_dim": (64,),
            "num_attention_heads": (4,), "max_position_embeddings": (32,), "do_layer_norm_before": (True, False),
            "layerdrop": (0.0,),
        },
    ),
}  # fmt: skip
_LATENT = {
    "q_lora_rank": (16, None), "kv_lora_rank": (16,), "qk_rope_head_dim": (8,), "qk_nope_head_dim": (8,),
    "v_head_dim": (8, 16), "n_routed_experts": (4,), "num_experts_per_tok": (2,), "n_group": (1,), "topk_group": (1,),
    "first_k_dense_replace": (0, 1), "moe_intermediate_size": (24,),
}  # fmt: skip
_ROOM = {"max_position_embeddings": (64,)}
DECODERS: dict[str, tuple[str, dict[str, tuple[Any, ...]]]] = {
    "BertForMaskedLM": ("bert", {**MODELS["BertForMaskedLM"][1], **_ROOM}),
    "GPT2LMHeadModel": ("gpt2", {**MODELS["GPT2LMHeadModel"][1], "n_positions": (64,)}),
    "LlamaForCausalLM": ("llama", {**_LLAMA, **_ROOM}),
    "Qwen3ForCausalLM": ("qwen3", {**_LLAMA, **_ROOM, "head_dim": (8,)}),
    "MistralForCausalLM": ("mistral", {**_LLAMA, "sliding_window": (None,)}),
    "Phi3ForCausalLM": ("phi3", {**_LLAMA, "sliding_window": (None,), "pad_token_id": (0,), "eos_token_id": (1,)}),
    "GPTNeoXForCausalLM": ("gpt_neox", {**_BERT, **_ROOM, "use_parallel_residual": (True, False)}),
    "GemmaForCausalLM": ("gemma", {**_LLAMA, "head_dim": (8,)}),
    "MixtralForCausalLM": ("mixtral", {**_LLAMA, "sliding_window": (None,), "num_local_experts": (4,)}),
    "DeepseekV3ForCausalLM": (
        "deepseek_v3",
        {**_LLAMA, "num_key_value_heads": (4,), "num_attention_heads": (4,), **_LATENT},
    ),
}
"""Models whose sequences can be divided, for ``--context``."""
