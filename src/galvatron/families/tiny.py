"""Tiny copies of stock models: the same architecture and as many layers, narrow enough to run in seconds on a CPU.

A copy is made from the configuration alone: widths, vocabulary and experts shrink, what makes the architecture what it
is (activations, norms, tied weights, kinds of layers, ratio of key/value heads) stays.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

__all__ = ["TINY_TOKENS", "tiny_config"]

_VOCABULARY = 128
TINY_TOKENS = 96
"""Tokens below this number have no special meaning in a tiny copy."""
_HEAD = 8
_POSITIONS = 64
_PATCHES = 4
"""A side of an image that is read beside text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """What the sizes of a tiny configuration follow from."""

    heads: int
    kv_heads: int
    degree: int
    experts: int
    """What the number of experts is a multiple of."""
    expand: int
    """How many times as wide a state space is as the model."""
    hidden: int
    """The model's true width; 0: not said."""
    stateful: bool
    """Whether heads are those of a state space."""

    @property
    def width(self) -> int:
        return self.heads * _HEAD

    @property
    def rotary(self) -> int:
        """Of the dims of a head, where these are counted separately."""
        return _HEAD


_Rule = tuple[str, Callable[[_Sizes, int], int]]
_RULES: tuple[_Rule, ...] = (
    (r"num_(key_value|kv)_heads|n_head_kv|num_key_value_groups|multi_query_group_num", lambda own, _: own.kv_heads),
    (
        r"(num|n)_(attention_)?heads?|n_head|(encoder|decoder)_(attention_)?heads|attention_heads",
        lambda own, _: own.heads * (own.expand if own.stateful else 1),
    ),
    (r"encoder_ffn_heads|num_(global|swa)_attention_heads", lambda own, _: own.heads),
    (r"linear_num_key_heads", lambda own, _: own.kv_heads),
    (r"linear_num_value_heads|linear_num_heads|index_n_heads", lambda own, _: own.heads),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", lambda own, _: own.heads * own.expand),
    (
        r"(global_|swa_|index_|linear_|linear_key_|linear_value_|mamba_)?(head_dim|d_kv|kv_channels|attention_head_dim)"
        r"|v_head_dim|qk_nope_head_dim|dim_head|mamba_d_head|mamba_headdim",
        lambda own, _: _HEAD,
    ),
    (r"qk_rope_head_dim", lambda own, _: own.rotary),
    (r"rotary_dim", lambda own, value: min(value, own.rotary)),
    (r"qk_head_dim", lambda own, _: _HEAD + own.rotary),
    (r"mamba_d_ssm", lambda own, _: own.expand * own.width),
    (
        r"hidden_size|d_model|n_embd|dim|embed_dim|emb_dim|embedding_dim|word_embed_proj_dim"
        r"|hidden_dim_base|(input|output)_embedding_size|cross_attention_hidden_size|pooler_hidden_size|lru_width"
        r"|attention_hidden_size|hidden_size_per_layer_input|prediction_head_size",
        lambda own, _: own.width,
    ),
    (r"embedding_size", lambda own, value: own.width if value >= own.hidden else own.width // 2),
    (r"(q|kv|o|attention|mla)?_?lora_rank(_.*)?", lambda own, value: min(value, 2 * _HEAD)),
    (r"(mamba_|ssm_)?(d_state|state_size)|mamba_dt_rank|time_step_rank", lambda own, value: min(value, 2 * _HEAD)),
    (
        r"(moe_)?(num|n)_(local_|routed_)?experts|moe_num_experts|num_moe_experts|n_routed_experts",
        lambda own, value: min(value, -(-max(4, own.degree) // own.experts) * own.experts),
    ),
    (r"zero_expert_num", lambda own, value: min(value, 2)),
    (
        r"(num_)?experts_per_(tok|token)|moe_k|moe_top_?k|top_k_experts|num_experts_per_token|moe_topk",
        lambda own, value: min(value, 2),
    ),
    (r"(mamba_)?n_groups", lambda own, value: min(value, own.kv_heads)),
    (r"n_group|topk_group|num_expert_group|num_limited_groups", lambda own, value: min(value, 1)),
    (
        r".*(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|hidden_dim|inner_dim|intermediate_dim)"
        r"|d_inner|intermediate_size_mlp|feed_forward_size|dff|dim_ff",
        lambda own, value: min(value, math.lcm(2 * _HEAD, own.degree)) if value > 0 else value,
    ),
    (r".*vocab_size.*", lambda own, value: min(value, _VOCABULARY)),
    (
        r"(max|max_encoder|max_decoder)_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length"
        r"|seq_length|max_(source|target)_positions",
        lambda own, value: min(value, _POSITIONS),
    ),
    (
        r"sliding_window|attention_window(_size)?|attention_chunk_size|window_size|local_attention|keep_window_size",
        lambda own, value: min(value, 4),
    ),
    (r"(mamba_)?chunk_size", lambda own, value: min(value, _HEAD)),
    (
        r".*_token_(id|index)",
        lambda own, value: value if value < TINY_TOKENS else TINY_TOKENS + value % (_VOCABULARY - TINY_TOKENS),
    ),
)
"""For names of fields, the first that fits: from sizes and the field's value to the tiny one."""


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
    sizes = _sizes(fields, degree, experts)
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            _shrink(value, degree, experts)
            continue
        small = _small(name, value, sizes)
        if small != value:
            _set(config, name, small)
    _shrink_images(config, fields)
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if isinstance(rope, dict) and "mrope_section" in rope:
            _set(config, name, {**rope, "mrope_section": [1, 1, _HEAD // 2 - 2]})


def _shrink_images(config: Any, fields: Mapping[str, Any]) -> None:
    """Small images for a vision tower that reads beside text, as many tokens and windows as fit them."""
    vision = fields.get("vision_config")
    if not isinstance(vision, PreTrainedConfig) or not isinstance(fields.get("text_config"), PreTrainedConfig):
        return
    patch, merge = getattr(vision, "patch_size", None), getattr(vision, "spatial_merge_size", None) or 1
    if not isinstance(patch, int):
        return
    if isinstance(getattr(vision, "image_size", None), int):
        _set(vision, "image_size", min(vision.image_size, _PATCHES * patch))
    if isinstance(getattr(vision, "window_size", None), int) and "spatial_merge_size" in vars(vision):
        _set(vision, "window_size", 2 * merge * patch)  # in pixels
    outputs = ("out_hidden_size", "projection_dim", *(("hidden_size",) if "embed_dim" in vars(vision) else ()))
    for name in outputs:
        if isinstance(getattr(vision, name, None), int):
            _set(vision, name, config.get_text_config().hidden_size)
    if isinstance(fields.get("mm_tokens_per_image"), int):
        _set(config, "mm_tokens_per_image", min(fields["mm_tokens_per_image"], (_PATCHES // 2) ** 2))


def _small(name: str, value: Any, sizes: _Sizes) -> Any:
    """A number by the first rule for its name; a list (of blocks or stages) in the ratio of its numbers."""
    if isinstance(value, list | tuple) and value and all(type(own) is int and own > 0 for own in value):
        if re.fullmatch(r"num_(attention_)?heads|hidden_sizes|embed_dims?|intermediate_size", name):
            unit = sizes.heads if "heads" in name else sizes.width
            return type(value)(max(1, own // value[0]) * unit for own in value)
        return value
    if type(value) is not int:
        return value
    return next((small(sizes, value) for names, small in _RULES if re.fullmatch(names, name)), value)


def _set(config: Any, name: str, value: Any) -> None:
    with suppress(AttributeError, ValueError, TypeError):  # a property: what it is computed from is shrunk
        setattr(config, name, value)


def _sizes(fields: Mapping[str, Any], degree: int, experts: int) -> _Sizes:
    """Heads and key/value heads, in the ratio that they have."""

    def first(place: int) -> int:
        values = [value for name, value in fields.items() if re.fullmatch(_RULES[place][0], name)]
        return next((own for own in values if isinstance(own, int)), 0)

    shared, found = first(0), first(1)
    expand = next((fields[name] for name in ("mamba_expand", "expand") if isinstance(fields.get(name), int)), 1)
    base = max(2, degree)
    heads, kv_heads = 2 * base, base
    if found and shared == 1:
        kv_heads = 1  # one head for all (multi-query): no TP divides it
    elif found and shared and found % shared == 0:
        heads = base * min(found // shared, 4)
    hidden = fields.get("hidden_size")
    return _Sizes(
        heads=heads,
        kv_heads=kv_heads,
        degree=degree,
        experts=experts,
        expand=expand,
        hidden=hidden if isinstance(hidden, int) else 0,
        stateful="expand" in fields,
    )
