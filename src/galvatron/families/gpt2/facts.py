"""GPT-2 and GPT-3 (``GPT2LMHeadModel``): pre-norm causal decoder, learned positions, tied head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families.facts.blocks import (
    AttentionShape,
    FeedForwardShape,
    HeadShape,
    attention,
    collectives,
    context_of,
    divided_by_tokens,
    dropout_active,
    feed_forward,
    language_head,
    token_count,
)
from galvatron.families.facts.ops import ID_BYTES, Op, dropout, layer, layer_norm, residual
from galvatron.families.family import Family
from galvatron.families.fields import Fields

__all__ = ["FAMILY", "Gpt2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt2:
    """Hyper-parameters; the defaults are Hugging Face's."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    inner: int | None = None
    """Width of the feed-forward part; None: four times the hidden size."""
    vocabulary: int = 50257
    positions: int = 1024
    activation: str = "gelu_new"
    embedding_dropout: float = 0.1
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    tied: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """Hugging Face's configuration."""
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_inner": self.inner,
            "vocab_size": self.vocabulary,
            "n_positions": self.positions,
            "activation_function": self.activation,
            "embd_pdrop": self.embedding_dropout,
            "resid_pdrop": self.hidden_dropout,
            "attn_pdrop": self.attention_dropout,
            "tie_word_embeddings": self.tied,
        }

    def spec(self, name: str, training: Training) -> ModelSpec:
        tokens = token_count(training, self.positions, model=name, learned_positions=True)
        element = training.precision.bytes
        cells = tokens * self.hidden
        boundary = cells * element
        norm = layer_norm(tokens, self.hidden, element=element)
        words, positions = self.vocabulary * self.hidden, self.positions * self.hidden
        embedding = layer(
            "embedding",
            (
                Op(
                    parameters=words + positions,
                    replicated_parameters=positions,
                    replicated=tokens * ID_BYTES,
                ),
                *dropout(cells, active=dropout_active(training, self.embedding_dropout), element=element),
            ),
            boundary=boundary,
            tensor_parallel=collectives(boundary, forward=1, backward=0),
        )
        drop = dropout(cells, active=dropout_active(training, self.hidden_dropout), element=element)
        attending = AttentionShape(
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.hidden // self.heads,
            queries=tokens,
            keys=tokens,
            span=tokens,
            bias=True,
            output_bias=True,
            causal=True,
            dropout=dropout_active(training, self.attention_dropout),
        )
        attend = attention(attending, training)
        feed = feed_forward(
            FeedForwardShape(
                tokens=tokens,
                hidden=self.hidden,
                inner=4 * self.hidden if self.inner is None else self.inner,
                activation=self.activation,
                bias=True,
            ),
            training,
        )
        decoder = layer(
            "decoder",
            (*residual((norm, *attend, *drop), boundary), *residual((norm, *feed, *drop), boundary)),
            boundary=boundary,
            tensor_parallel=collectives(
                boundary, forward=2, backward=2, divides=(self.heads,), sequence_divides=(tokens,)
            ),
        )
        decoder = replace(decoder, context=context_of(attending, training))
        shape = HeadShape(tokens=tokens, hidden=self.hidden, vocabulary=self.vocabulary, tied=self.tied)
        head = language_head((norm,), training, shape, boundary=boundary)
        return ModelSpec(
            name=name,
            family="gpt2",
            layers=(divided_by_tokens(embedding, tokens), *[decoder] * self.layers, divided_by_tokens(head, tokens)),
            training=replace(training, sequence_length=tokens),
            config=self.config,
        )


def _read(fields: Fields) -> Gpt2:
    if fields.flag("add_cross_attention", False):
        raise fields.error("add_cross_attention", True, "false: cross-attention in GPT-2 is not supported")
    hidden, heads = fields.hidden_and_heads(("n_embd", "hidden_size"), 768, ("n_head", "num_attention_heads"), 12)
    return Gpt2(
        hidden=hidden,
        layers=fields.layers("n_layer", "num_hidden_layers", default=12),
        heads=heads,
        inner=fields.optional_count("n_inner"),
        vocabulary=fields.count("vocab_size", default=50257),
        positions=fields.count("n_positions", "max_position_embeddings", default=1024),
        activation=fields.activation("activation_function", default="gelu_new"),
        embedding_dropout=fields.probability("embd_pdrop", default=0.1),
        hidden_dropout=fields.probability("resid_pdrop", default=0.1),
        attention_dropout=fields.probability("attn_pdrop", default=0.1),
        tied=fields.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    model_type="gpt2",
    head_class="GPT2LMHeadModel",
    read=_read,
    known={
        "gpt2": Gpt2(),
        "gpt2-medium": Gpt2(hidden=1024, layers=24, heads=16),
        "gpt2-large": Gpt2(hidden=1280, layers=36, heads=20),
        "gpt2-xl": Gpt2(hidden=1600, layers=48, heads=25),
        "gpt3-6.7b": Gpt2(hidden=4096, layers=32, heads=32, positions=2048),
        "gpt3-13b": Gpt2(hidden=5120, layers=40, heads=40, positions=2048),
        "gpt3-175b": Gpt2(hidden=12288, layers=96, heads=96, positions=2048),
    },
    tiny={"gpt2-tiny": Gpt2(hidden=128, layers=2, heads=2, positions=128)},
    rank=2,
)
