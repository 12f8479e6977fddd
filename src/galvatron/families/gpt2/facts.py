"""GPT-2 and GPT-3 (``GPT2LMHeadModel``): pre-norm causal decoder, learned positions, tied head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families.facts.blocks import (
    AttentionShape,
    FeedForwardShape,
    attention,
    collectives,
    dropout_active,
    feed_forward,
    language_head,
    token_count,
)
from galvatron.families.facts.ops import ID_BYTES, Op, dropout, layer, layer_norm, residual

__all__ = ["Gpt2"]


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
        attend = attention(
            AttentionShape(
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
            ),
            training,
        )
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
        head = language_head(
            (norm,),
            training,
            tokens=tokens,
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            bias=False,
            tied=self.tied,
            boundary=boundary,
        )
        return ModelSpec(
            name=name,
            family="gpt2",
            layers=(embedding, *[decoder] * self.layers, head),
            training=replace(training, sequence_length=tokens),
            config=self.config,
        )
