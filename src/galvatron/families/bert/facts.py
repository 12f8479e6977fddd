"""BERT (Hugging Face's ``BertForMaskedLM``): post-norm encoder, learned positions, masked-language-model head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from galvatron.core.spec.model import Attention, ModelSpec, Training
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
    paper_block,
    token_count,
)
from galvatron.families.facts.ops import ID_BYTES, Op, Split, activation, dropout, layer, layer_norm, linear, residual
from galvatron.families.family import Family
from galvatron.families.fields import Fields

__all__ = ["FAMILY", "Bert"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bert:
    """Hyper-parameters; the defaults are Hugging Face's."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    inner: int = 3072
    vocabulary: int = 30522
    positions: int = 512
    token_types: int = 2
    activation: str = "gelu"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    tied: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """Hugging Face's configuration."""
        return {
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "type_vocab_size": self.token_types,
            "hidden_act": self.activation,
            "hidden_dropout_prob": self.hidden_dropout,
            "attention_probs_dropout_prob": self.attention_dropout,
            "tie_word_embeddings": self.tied,
        }

    def spec(self, name: str, training: Training) -> ModelSpec:
        tokens = token_count(training, self.positions, model=name, learned_positions=True)
        element = training.precision.bytes
        boundary = tokens * self.hidden * element
        drop = dropout(tokens * self.hidden, active=dropout_active(training, self.hidden_dropout), element=element)
        norm = layer_norm(tokens, self.hidden, element=element)
        tables = (self.positions + self.token_types) * self.hidden
        words = self.vocabulary * self.hidden
        embedding = layer(
            "embedding",
            (Op(parameters=words + tables, replicated_parameters=tables, replicated=tokens * ID_BYTES), norm, *drop),
            boundary=boundary,
            tensor_parallel=collectives(boundary, forward=1, backward=0),
        )
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
            dropout=dropout_active(training, self.attention_dropout),
        )
        attend = attention(attending, training)
        feed = feed_forward(
            FeedForwardShape(
                tokens=tokens, hidden=self.hidden, inner=self.inner, activation=self.activation, bias=True
            ),
            training,
        )
        # The paper's Table 1 shows a map of tokens² in each block on top (94.26 MiB): the mask its attention added.
        mask = (Op(replicated=tokens**2 * element),) if training.attention is Attention.PAPER else ()
        encoder = layer(
            "encoder",
            (*mask, *residual((*attend, *drop), boundary), norm, *residual((*feed, *drop), boundary), norm),
            boundary=boundary,
            tensor_parallel=collectives(
                boundary, forward=2, backward=2, divides=(self.heads,), sequence_divides=(tokens,)
            ),
        )
        encoder = replace(encoder, context=context_of(attending, training))
        transform = linear(tokens, self.hidden, self.hidden, Split.WHOLE, element=element, bias=True)
        act = activation(self.activation, tokens * self.hidden, element=element, output_kept=True, split=False)
        # Untied, Hugging Face has two biases over the vocabulary, the head's own and the projection's.
        shape = HeadShape(tokens=tokens, hidden=self.hidden, vocabulary=self.vocabulary, bias=True, tied=self.tied)
        head = language_head(
            (transform, act, norm, Op(parameters=0 if self.tied else self.vocabulary)),
            training,
            shape,
            boundary=boundary,
        )
        return ModelSpec(
            name=name,
            family="bert",
            layers=(
                divided_by_tokens(embedding, tokens),
                *[paper_block(encoder, training)] * self.layers,
                divided_by_tokens(head, tokens),
            ),
            training=replace(training, sequence_length=tokens),
            config=self.config,
        )


def _read(fields: Fields) -> Bert:
    for flag in ("is_decoder", "add_cross_attention"):
        if fields.flag(flag, False):
            raise fields.error(flag, True, "false: only the BERT encoder is supported")
    hidden, heads = fields.hidden_and_heads(("hidden_size",), 768, ("num_attention_heads",), 12)
    return Bert(
        hidden=hidden,
        layers=fields.layers("num_hidden_layers", default=12),
        heads=heads,
        inner=fields.count("intermediate_size", default=3072),
        vocabulary=fields.count("vocab_size", default=30522),
        positions=fields.count("max_position_embeddings", default=512),
        token_types=fields.count("type_vocab_size", default=2),
        activation=fields.activation("hidden_act", default="gelu"),
        hidden_dropout=fields.probability("hidden_dropout_prob", default=0.1),
        attention_dropout=fields.probability("attention_probs_dropout_prob", default=0.1),
        tied=fields.flag("tie_word_embeddings", True),
    )


def _huge(depth: int) -> Bert:
    return Bert(hidden=1280, layers=depth, heads=16, inner=5120)


FAMILY = Family(
    model_type="bert",
    head_class="BertForMaskedLM",
    read=_read,
    by_depth={"bert-huge": _huge},
    # Heads are not in the paper: these fit its activation sizes.
    paper={"bert-xhuge": Bert(hidden=2560, layers=128, heads=32, inner=10240)},
    known={"bert-base": Bert(), "bert-large": Bert(hidden=1024, layers=24, heads=16, inner=4096)},
    tiny={"bert-tiny": Bert(hidden=128, layers=2, heads=2, inner=512)},
    rank=1,
    paper_rank=1,
)
