"""Tiny copies of stock models: the same architecture and as many layers, narrow enough to run in seconds on a CPU.

A copy is made from the configuration alone: widths, vocabulary and experts shrink, what makes the architecture what it
is (activations, norms, tied weights, kinds of layers, ratio of key/value heads) stays.
"""

from __future__ import annotations

import copy
import math
import re
from contextlib import suppress
from typing import Any

from transformers import PreTrainedConfig

__all__ = ["TINY_TOKENS", "tiny_config"]

_VOCABULARY = 128
TINY_TOKENS = 96
"""Tokens below this number have no special meaning in a tiny copy."""
_HEAD = 8
_POSITIONS = 64

_HIDDEN = re.compile(r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|hidden_dim_base")
_FEED_FORWARD = re.compile(
    r".*(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|hidden_dim|inner_dim|intermediate_dim)|d_inner"
)
_HEADS = re.compile(r"(num|n)_(attention_)?heads?|n_head|(encoder|decoder)_attention_heads|attention_heads")
_KEY_VALUE_HEADS = re.compile(r"num_(key_value|kv)_heads|n_head_kv|num_key_value_groups|multi_query_group_num")
_HEAD_DIM = re.compile(r"(global_|swa_)?(head_dim|d_kv|kv_channels|attention_head_dim|v_head_dim|qk_nope_head_dim)")
_ROTARY_DIM = re.compile(r"qk_rope_head_dim|rotary_dim")
_RANK = re.compile(r"(q|kv|o|attention|mla)?_?lora_rank(_.*)?")
_EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts|moe_num_experts|num_moe_experts|n_routed_experts")
_CHOSEN = re.compile(r"(num_)?experts_per_(tok|token)|moe_k|moe_top_?k|top_k_experts|num_experts_per_token|moe_topk")
_POSITION = re.compile(r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length")
_WINDOW = re.compile(r"sliding_window|attention_window_size|attention_chunk_size|window_size|local_attention")


def tiny_config(config: PreTrainedConfig, *, degree: int = 1, experts: int = 1) -> PreTrainedConfig:
    """A narrow configuration of the same architecture, whose heads ``degree`` ranks of TP can divide, and whose experts
    so many ranks of EP.

    Raises nothing itself: what cannot be built narrow shows when the model is built.
    """
    tiny = copy.deepcopy(config)
    _shrink(tiny, degree, experts)
    return tiny


def _shrink(config: Any, degree: int, experts: int) -> None:
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    heads, kv_heads = _heads(fields, degree)
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            _shrink(value, degree, experts)
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int):
            few = min(value, -(-max(4, degree) // experts) * experts)
            small = few if _EXPERTS.fullmatch(name) else _smaller(name, value, heads, kv_heads, degree)
            if small != value:
                _set(config, name, small)
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if isinstance(rope, dict) and "mrope_section" in rope:
            _set(config, name, {**rope, "mrope_section": [1, 1, _HEAD // 2 - 2]})


def _set(config: Any, name: str, value: Any) -> None:
    with suppress(AttributeError, ValueError, TypeError):  # a property: what it is computed from is shrunk
        setattr(config, name, value)


def _heads(fields: dict[str, Any], degree: int) -> tuple[int, int]:
    """Heads and key/value heads, in the ratio that they have."""
    found = [value for name, value in fields.items() if _HEADS.fullmatch(name) and isinstance(value, int)]
    shared = [value for name, value in fields.items() if _KEY_VALUE_HEADS.fullmatch(name) and isinstance(value, int)]
    if not found:
        return degree, degree
    ratio = found[0] // shared[0] if shared and shared[0] and found[0] % shared[0] == 0 else 1
    if shared and shared[0] == 1:
        return max(2, degree), 1  # one head for all (multi-query): no TP divides it
    base = max(2, degree)
    ratio = min(ratio, 4)
    return base * ratio, base


def _smaller(name: str, value: int, heads: int, kv_heads: int, degree: int) -> int:
    width = heads * _HEAD
    small = value
    if _KEY_VALUE_HEADS.fullmatch(name):
        small = kv_heads
    elif _HEADS.fullmatch(name):
        small = heads
    elif _HEAD_DIM.fullmatch(name):
        small = _HEAD
    elif _ROTARY_DIM.fullmatch(name):
        small = min(value, _HEAD)
    elif _HIDDEN.fullmatch(name):
        small = width
    elif _RANK.fullmatch(name):
        small = min(value, 2 * _HEAD)
    elif _CHOSEN.fullmatch(name):
        small = min(value, 2)
    elif name in ("n_group", "topk_group", "num_expert_group", "num_limited_groups"):
        small = min(value, 1)
    elif _FEED_FORWARD.fullmatch(name):
        small = min(value, math.lcm(2 * _HEAD, degree)) if value > 0 else value
    elif name.startswith("vocab_size"):
        small = min(value, _VOCABULARY)
    elif _POSITION.fullmatch(name):
        small = min(value, _POSITIONS)
    elif _WINDOW.fullmatch(name):
        small = min(value, 4)
    elif name.endswith(("_token_id", "_token_index")) and value >= TINY_TOKENS:
        small = TINY_TOKENS + value % (_VOCABULARY - TINY_TOKENS)
    return small
