"""T5 (``T5ForConditionalGeneration``): embedding, encoders, decoder_embedding, decoders, head.

The decoder embedding also ends the encoder (its final norm and dropout); from there on two tensors travel: what the
encoder made and the decoder's hidden state. In the stock model the first block of a stack computes the relative
position bias for all; here every block has the table, tied to the first one's, so that blocks can be split and placed
independently. The cut adds these tables to the stock model's blocks; its own forward is not changed by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.families.adapters import bidirectional_mask, causal_mask, count_targets, random_tokens
from galvatron.families.layer import Activations, Batch, CrossEntropy, Layer, LayeredModel, Tie, Use
from galvatron.families.rules import Attribute, Columns, Region, Rows, Rule, Table, Vocabulary, VocabularyLoss

__all__ = ["ADAPTER", "T5"]

_LENGTH = 512
"""T5 has no longest sequence; this is the length it was trained with."""
_TABLE = "layer.0.SelfAttention.relative_attention_bias.weight"


@dataclass(frozen=True, slots=True)
class _Context:
    batch: Batch
    decoder_ids: Tensor | None
    encoder_mask: Tensor | None = None
    decoder_mask: Tensor | None = None
    cross_mask: Tensor | None = None


class _Embedding(Layer):
    tokens: nn.Module
    dropout: nn.Module

    def __init__(self, model: Any) -> None:
        modules = {"tokens": ("shared", model.shared), "dropout": ("encoder.dropout", model.encoder.dropout)}
        super().__init__("embedding", modules, (Vocabulary("tokens"),))

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"input_ids"})

    def forward(self, activations: Activations, context: _Context) -> Activations:
        return (self.dropout(self.tokens(context.batch["input_ids"])),)


class _DecoderEmbedding(Layer):
    norm: nn.Module
    encoder_dropout: nn.Module
    tokens: nn.Module
    dropout: nn.Module

    def __init__(self, model: Any) -> None:
        modules = {
            "norm": ("encoder.final_layer_norm", model.encoder.final_layer_norm),
            "encoder_dropout": ("encoder.dropout", model.encoder.dropout),
            "tokens": ("decoder.embed_tokens", model.decoder.embed_tokens),
            "dropout": ("decoder.dropout", model.decoder.dropout),
        }
        super().__init__("decoder_embedding", modules, (Vocabulary("tokens"),))

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"decoder_input_ids", "labels"})

    def forward(self, activations: Activations, context: _Context) -> Activations:
        (hidden,) = activations
        return self.encoder_dropout(self.norm(hidden)), self.dropout(self.tokens(context.decoder_ids))


class _Block(Layer):
    """An encoder or a decoder."""

    block: nn.Module

    def __init__(self, stack: str, index: int, block: Any) -> None:
        attentions = ["block.layer.0.SelfAttention"]
        rules: list[Rule] = [Table(f"block.{_TABLE}", dim=1)]
        if stack == "decoder":
            attentions.append("block.layer.1.EncDecAttention")
            rules.append(Attribute("block.layer.1.EncDecAttention.n_heads"))
        for path in attentions:
            rules.append(Region(path, ("hidden_states", "key_value_states")))
            reads = "key_value_states" if path.endswith("EncDecAttention") else None
            rules += [Columns(f"{path}.q"), Columns(f"{path}.k", reads=reads), Columns(f"{path}.v", reads=reads)]
            rules.append(Rows(f"{path}.o"))
        feed = f"block.layer.{len(attentions)}.DenseReluDense"
        projections = [name for name, _ in block.layer[-1].DenseReluDense.named_children() if name.startswith("wi")]
        rules += [Region(feed), *(Columns(f"{feed}.{name}") for name in projections), Rows(f"{feed}.wo")]
        super().__init__(stack, {"block": (f"{stack}.block.{index}", block)}, tuple(rules))

    @property
    def inputs(self) -> frozenset[str]:
        if self.kind == "encoder":
            return frozenset({"input_ids", "attention_mask"})
        return frozenset({"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "labels"})

    def forward(self, activations: Activations, context: _Context) -> Activations:
        if self.kind == "encoder":
            (hidden,) = activations
            return (self.block(hidden, attention_mask=context.encoder_mask)[0],)
        encoded, hidden = activations
        hidden, *_ = self.block(
            hidden,
            attention_mask=context.decoder_mask,
            encoder_hidden_states=encoded,
            encoder_attention_mask=context.cross_mask,
        )
        return encoded, hidden


class _Head(Layer):
    norm: nn.Module
    dropout: nn.Module
    lm_head: nn.Module

    def __init__(self, model: Any) -> None:
        modules = {
            "norm": ("decoder.final_layer_norm", model.decoder.final_layer_norm),
            "dropout": ("decoder.dropout", model.decoder.dropout),
            "lm_head": ("lm_head", model.lm_head),
        }
        super().__init__("head", modules, (Region("lm_head"), Columns("lm_head"), VocabularyLoss("loss")))
        self.scale = model.model_dim**-0.5 if model.config.scale_decoder_outputs else None
        self.loss, self.projection = CrossEntropy(), "lm_head"

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"labels"})

    def forward(self, activations: Activations, context: _Context) -> Activations:
        _, hidden = activations
        hidden = self.dropout(self.norm(hidden))
        if self.scale is not None:
            hidden = hidden * self.scale
        return (self.loss(self.lm_head(hidden), context.batch["labels"]),)


class T5(LayeredModel):
    """Batches have ``input_ids`` and ``labels``; decoder ids are the labels shifted right unless they are given."""

    required = frozenset({"input_ids", "labels"})
    stand_ins = ("shared",)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.words: int = model.config.vocab_size
        self.shift_right = model.prepare_decoder_input_ids_from_labels
        self.encoder, self.decoder = model.encoder.config, model.decoder.config
        for stack in ("encoder", "decoder"):
            _give_tables(model, stack)
        encoders = [_Block("encoder", index, block) for index, block in enumerate(model.encoder.block)]
        decoders = [_Block("decoder", index, block) for index, block in enumerate(model.decoder.block)]
        self.layers = (_Embedding(model), *encoders, _DecoderEmbedding(model), *decoders, _Head(model))
        joint, last = len(encoders) + 1, len(self.layers) - 1
        self._joint = joint
        words = [Use(0, "tokens.weight"), Use(joint, "tokens.weight")]
        if model.lm_head.weight is model.shared.weight:
            words.append(Use(last, "lm_head.weight"))
        tables = [range(1, joint), range(joint + 1, last)]
        self.ties = (
            Tie(tuple(words)),
            *(Tie(tuple(Use(layer, f"block.{_TABLE}") for layer in stack), small=True) for stack in tables),
        )

    def context(self, batch: Batch, dtype: torch.dtype) -> _Context:
        ids, decoder_ids, labels = batch.get("input_ids"), batch.get("decoder_input_ids"), batch.get("labels")
        padding = batch.get("attention_mask")
        if decoder_ids is None and labels is not None:
            decoder_ids = self.shift_right(labels)
        if ids is None:  # a stage without blocks
            return _Context(batch, decoder_ids)
        encoder_mask = bidirectional_mask(self.encoder, ids, dtype, padding)
        if decoder_ids is None:  # a stage with encoders alone
            return _Context(batch, None, encoder_mask)
        decoder_mask = causal_mask(self.decoder, decoder_ids, dtype, batch.get("decoder_attention_mask"), None)
        cross_mask = bidirectional_mask(self.decoder, decoder_ids, dtype, padding, keys=ids)
        return _Context(batch, decoder_ids, encoder_mask, decoder_mask, cross_mask)

    def carried(self, index: int, samples: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        width: int = self.encoder.d_model
        source = (samples["input_ids"][0], width)
        target = (samples.get("decoder_input_ids", samples["labels"])[0], width)
        return (source,) if index <= self._joint else (source, target)

    def targets(self, batch: Batch) -> int:
        return count_targets(batch["labels"])

    def example(self, rows: int, sequence_length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
        length = sequence_length or _LENGTH
        return {
            "input_ids": random_tokens(rows, length, self.words, generator),
            "labels": random_tokens(rows, length, self.words, generator),
        }


def _give_tables(model: Any, stack: str) -> None:
    """Each block its own table module over the one parameter of the first block."""
    first, *others = getattr(model, stack).block
    table = first.layer[0].SelfAttention.relative_attention_bias.weight
    for index, block in enumerate(others, start=1):
        attention = block.layer[0].SelfAttention
        attention.has_relative_attention_bias = True
        attention.relative_attention_bias = nn.Embedding(*table.shape)
        attention.relative_attention_bias.weight = table
        # So that save_pretrained still writes the table once.
        names = {f"{stack}.block.{index}.{_TABLE}": f"{stack}.block.0.{_TABLE}"}
        model._tied_weights_keys = {**model._tied_weights_keys, **names}


ADAPTER = T5
