"""T5 (``T5ForConditionalGeneration``): encoder and decoder, RMS norms, relative position biases, tied embeddings.

Layers: embedding, encoders, ``decoder_embedding`` (which also ends the encoder with its final norm), decoders, head.
From the decoder embedding on, the encoder's output travels along, so boundaries are two tensors. Each stack's table of
relative position biases is counted with the embedding before it, so that all blocks of a stack are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families.facts.blocks import (
    AttentionShape,
    FeedForwardShape,
    HeadShape,
    RmsNorm,
    attention,
    collectives,
    dropout_active,
    feed_forward,
    language_head,
    paper_block,
    rms_norm,
    token_count,
)
from galvatron.families.facts.ops import ID_BYTES, Op, dropout, layer, residual
from galvatron.families.family import Family
from galvatron.families.fields import Fields

__all__ = ["FAMILY", "T5"]


@dataclass(frozen=True, kw_only=True, slots=True)
class T5:
    """Hyper-parameters; the defaults are Hugging Face's. Source and target have the same length."""

    hidden: int = 512
    encoders: int = 6
    decoders: int = 6
    heads: int = 8
    head_dim: int = 64
    inner: int = 2048
    vocabulary: int = 32128
    positions: int = 512
    """Length it was trained with; relative positions set no hard limit."""
    buckets: int = 32
    """Rows of the relative position table."""
    activation: str = "relu"
    gated: bool = False
    dropout: float = 0.1

    @property
    def config(self) -> dict[str, Any]:
        """Hugging Face's configuration."""
        return {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": self.hidden,
            "num_layers": self.encoders,
            "num_decoder_layers": self.decoders,
            "num_heads": self.heads,
            "d_kv": self.head_dim,
            "d_ff": self.inner,
            "vocab_size": self.vocabulary,
            "n_positions": self.positions,
            "relative_attention_num_buckets": self.buckets,
            "feed_forward_proj": f"gated-{self.activation}" if self.gated else self.activation,
            "dropout_rate": self.dropout,
            "tie_word_embeddings": True,
            "is_encoder_decoder": True,
            "decoder_start_token_id": 0,  # T5 starts with padding; its class has no default for it
        }

    def spec(self, name: str, training: Training) -> ModelSpec:
        tokens = token_count(training, self.positions, model=name, learned_positions=False)
        element = training.precision.bytes
        cells = tokens * self.hidden
        message = cells * element
        dropped = dropout_active(training, self.dropout)
        drop = dropout(cells, active=dropped, element=element)
        norm = rms_norm(tokens, self.hidden, RmsNorm.T5, element=element, compiled=training.compile)
        last = rms_norm(tokens, self.hidden, RmsNorm.T5, element=element)  # of a stack: only blocks are compiled
        words, table = self.vocabulary * self.hidden, self.buckets * self.heads
        lookup = Op(parameters=words + table, replicated_parameters=table, replicated=tokens * ID_BYTES)
        vocabulary_parallel = collectives(message, forward=1, backward=0)
        embedding = layer("embedding", (lookup, *drop), boundary=message, tensor_parallel=vocabulary_parallel)
        # The encoder's output is kept here once for the cross-attention of all decoders.
        output = Op(replicated=message, gradient=message)
        decoder_embedding = layer(
            "decoder_embedding",
            (last, output, *drop, replace(lookup, tied_parameters=words), *drop),
            boundary=2 * message,
            tensor_parallel=vocabulary_parallel,
        )

        def attend(*, causal: bool, cross: bool) -> tuple[Op, ...]:
            return attention(
                AttentionShape(
                    hidden=self.hidden,
                    heads=self.heads,
                    kv_heads=self.heads,
                    head_dim=self.head_dim,
                    queries=tokens,
                    keys=tokens,
                    span=tokens,
                    bias=False,
                    output_bias=False,
                    causal=causal,
                    dropout=dropped,
                    # Merged with the mask anew in every layer; the cross-attention's is zero and shared by all.
                    fused_bias_bytes=0 if cross else self.heads * tokens**2 * element,
                ),
                training,
            )

        feed = feed_forward(
            FeedForwardShape(
                tokens=tokens,
                hidden=self.hidden,
                inner=self.inner,
                activation=self.activation,
                bias=False,
                gated=self.gated,
                inner_dropout=dropped,
            ),
            training,
        )
        encoder = layer(
            "encoder",
            (
                *residual((norm, *attend(causal=False, cross=False), *drop), message),
                *residual((norm, *feed, *drop), message),
            ),
            boundary=message,
            tensor_parallel=collectives(
                message, forward=2, backward=2, divides=(self.heads,), sequence_divides=(tokens,)
            ),
        )
        decoder = layer(
            "decoder",
            (
                *residual((norm, *attend(causal=True, cross=False), *drop), message),
                *residual((norm, *attend(causal=False, cross=True), *drop), message),
                *residual((norm, *feed, *drop), message),
            ),
            boundary=2 * message,
            # One more in backward: the gradient of the encoder's output is summed in every decoder.
            tensor_parallel=collectives(
                message, forward=3, backward=4, divides=(self.heads,), sequence_divides=(tokens,)
            ),
        )
        shape = HeadShape(tokens=tokens, hidden=self.hidden, vocabulary=self.vocabulary, tied=True)
        head = language_head((last, *drop), training, shape, boundary=2 * message)
        encoders = [paper_block(encoder, training)] * self.encoders
        decoders = [paper_block(decoder, training)] * self.decoders
        return ModelSpec(
            name=name,
            family="t5",
            layers=(embedding, *encoders, decoder_embedding, *decoders, head),
            training=replace(training, sequence_length=tokens),
            config=self.config,
        )


def _read(fields: Fields) -> T5:
    if not fields.flag("is_encoder_decoder", True):
        raise fields.error("is_encoder_decoder", False, "true: T5 needs both its stacks")
    encoders = fields.layers("num_layers", "num_hidden_layers", default=6)
    projection = fields.text("feed_forward_proj", default="relu")
    gate, _, plain = projection.rpartition("-")
    if gate not in ("", "gated"):
        raise fields.error("feed_forward_proj", projection, "an activation such as 'relu', or 'gated-' and one")
    return T5(
        hidden=fields.count("d_model", "hidden_size", default=512),
        encoders=encoders,
        decoders=fields.layers("num_decoder_layers", default=encoders),
        heads=fields.count("num_heads", "num_attention_heads", default=8),
        head_dim=fields.count("d_kv", "head_dim", default=64),
        inner=fields.count("d_ff", default=2048),
        vocabulary=fields.count("vocab_size", default=32128),
        positions=fields.count("n_positions", default=512),
        buckets=fields.count("relative_attention_num_buckets", default=32),
        # Transformers reads "gated-gelu" as the written-out gelu.
        activation=fields.known_activation("feed_forward_proj", "gelu_new" if projection == "gated-gelu" else plain),
        gated=gate == "gated",
        dropout=fields.probability("dropout_rate", default=0.1),
    )


def _large(depth: int) -> T5:
    if depth % 2:
        raise InvalidInput(f"t5-large-{depth}: half of the layers are decoders, so {depth} must be even")
    return T5(hidden=1024, encoders=depth // 2, decoders=depth // 2, heads=16, inner=4096)


FAMILY = Family(
    model_type="t5",
    head_class="T5ForConditionalGeneration",
    read=_read,
    by_depth={"t5-large": _large},
    known={"t5-base": T5(hidden=768, encoders=12, decoders=12, heads=12, inner=3072), "t5-large": _large(48)},
    tiny={"t5-tiny": T5(hidden=128, encoders=2, decoders=2, heads=4, head_dim=32, inner=512, positions=128)},
    rank=4,
    paper_rank=3,
)
