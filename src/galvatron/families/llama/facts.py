"""Llama (``LlamaForCausalLM``): pre-norm causal decoder with RMS norms, rotary positions and a gated feed-forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from galvatron.core.spec.float8 import float8_of
from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families.facts.blocks import (
    AttentionShape,
    FeedForwardShape,
    HeadShape,
    RmsNorm,
    attention,
    collectives,
    context_of,
    divided_by_tokens,
    dropout_active,
    feed_forward,
    language_head,
    rms_norm,
    rotates_by_length,
    token_count,
)
from galvatron.families.facts.ops import ID_BYTES, Op, layer, residual
from galvatron.families.family import Family
from galvatron.families.fields import Fields

__all__ = ["FAMILY", "Llama"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama:
    """Hyper-parameters; the defaults are Hugging Face's."""

    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int | None = None
    """Key/value heads, shared by groups of query heads; None: one for each."""
    head_dim: int | None = None
    """None: hidden size / heads."""
    inner: int = 11008
    vocabulary: int = 32000
    positions: int = 2048
    """Trained length; rotary positions set no hard limit."""
    rope_theta: float = 10000.0
    """Longest wavelength of the rotary positions, over 2π."""
    rope_type: str = "default"
    """How they are stretched, by transformers' name."""
    norm_epsilon: float = 1e-6
    activation: str = "silu"
    attention_bias: bool = False
    feed_forward_bias: bool = False
    attention_dropout: float = 0.0
    tied: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Hugging Face's configuration."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_epsilon,
            "hidden_act": self.activation,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.feed_forward_bias,
            "attention_dropout": self.attention_dropout,
            "tie_word_embeddings": self.tied,
        }

    def spec(self, name: str, training: Training) -> ModelSpec:
        tokens = token_count(training, self.positions, model=name, learned_positions=False)
        element = training.precision.bytes
        boundary = tokens * self.hidden * element
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        norm = rms_norm(tokens, self.hidden, RmsNorm.LLAMA, element=element, compiled=training.compile)
        last = rms_norm(tokens, self.hidden, RmsNorm.LLAMA, element=element)  # only blocks are compiled
        words = self.vocabulary * self.hidden
        embedding = layer(
            "embedding",
            (Op(parameters=words, replicated=tokens * ID_BYTES),),
            boundary=boundary,
            tensor_parallel=collectives(boundary, forward=1, backward=0),
        )
        attending = AttentionShape(
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=kv_heads,
            head_dim=self.hidden // self.heads if self.head_dim is None else self.head_dim,
            queries=tokens,
            keys=tokens,
            span=tokens,
            bias=self.attention_bias,
            output_bias=self.attention_bias,
            causal=True,
            dropout=dropout_active(training, self.attention_dropout),
            fp32_softmax=True,
        )
        attend = attention(attending, training)
        feed = feed_forward(
            FeedForwardShape(
                tokens=tokens,
                hidden=self.hidden,
                inner=self.inner,
                activation=self.activation,
                bias=self.feed_forward_bias,
                gated=True,
            ),
            training,
        )
        divides = (self.heads,) if kv_heads == self.heads else (self.heads, kv_heads)
        decoder = layer(
            "decoder",
            (*residual((norm, *attend), boundary), *residual((norm, *feed), boundary)),
            boundary=boundary,
            tensor_parallel=collectives(boundary, forward=2, backward=2, divides=divides, sequence_divides=(tokens,)),
        )
        divided = not rotates_by_length(self.rope_type)
        decoder = replace(decoder, context=context_of(attending, training) if divided else None)
        if training.float8:
            width = self.heads * (self.hidden // self.heads if self.head_dim is None else self.head_dim)
            narrow = width // self.heads * kv_heads
            shapes = [(self.hidden, width), (self.hidden, narrow), (self.hidden, narrow), (width, self.hidden)]
            shapes += [(self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden)]
            decoder = replace(decoder, float8=float8_of(tokens, shapes))
        shape = HeadShape(tokens=tokens, hidden=self.hidden, vocabulary=self.vocabulary, tied=self.tied)
        head = language_head((last,), training, shape, boundary=boundary)
        if divided:
            embedding, head = (divided_by_tokens(own, tokens) for own in (embedding, head))
        return ModelSpec(
            name=name,
            family="llama",
            layers=(embedding, *[decoder] * self.layers, head),
            training=replace(training, sequence_length=tokens),
            config=self.config,
        )


def _read(fields: Fields) -> Llama:
    hidden, heads = fields.hidden_and_heads(("hidden_size",), 4096, ("num_attention_heads",), 32)
    kv_heads = fields.optional_count("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    return Llama(
        hidden=hidden,
        layers=fields.layers("num_hidden_layers", default=32),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.optional_count("head_dim"),
        inner=fields.count("intermediate_size", default=11008),
        vocabulary=fields.count("vocab_size", default=32000),
        positions=fields.count("max_position_embeddings", default=2048),
        rope_type=fields.rope_type(),
        activation=fields.activation("hidden_act", default="silu"),
        attention_bias=fields.flag("attention_bias", False),
        feed_forward_bias=fields.flag("mlp_bias", False),
        attention_dropout=fields.probability("attention_dropout", default=0.0),
        tied=fields.flag("tie_word_embeddings", False),
    )


_llama2 = partial(Llama, positions=4096, norm_epsilon=1e-5)
_llama3 = partial(Llama, vocabulary=128256, positions=8192, rope_theta=500_000.0, norm_epsilon=1e-5)

FAMILY = Family(
    recipes=frozenset({"torchtitan"}),
    model_type="llama",
    head_class="LlamaForCausalLM",
    read=_read,
    known={
        "llama2-7b": _llama2(),
        "llama2-13b": _llama2(hidden=5120, layers=40, heads=40, inner=13824),
        "llama2-70b": _llama2(hidden=8192, layers=80, heads=64, kv_heads=8, inner=28672),
        "llama3-8b": _llama3(kv_heads=8, inner=14336),
        "llama3-70b": _llama3(hidden=8192, layers=80, heads=64, kv_heads=8, inner=28672),
    },
    tiny={"llama-tiny": Llama(hidden=128, layers=2, heads=4, kv_heads=2, inner=352, vocabulary=1000, positions=128)},
    rank=3,
)
