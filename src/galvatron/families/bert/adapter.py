"""BERT (``BertForMaskedLM``): embedding, encoders, head; the head's projection is the word embedding, transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.families.adapters import (
    TokenContext,
    bidirectional_mask,
    count_targets,
    masked_labels,
    random_tokens,
    require,
    stock_children,
)
from galvatron.families.layer import Activations, Batch, CrossEntropy, Layer, LayeredModel, Tie, Use
from galvatron.families.rules import Columns, Region, Rows, Vocabulary, VocabularyLoss

__all__ = ["ADAPTER", "Bert"]


class _Embedding(Layer):
    embeddings: nn.Module

    def __init__(self, model: Any) -> None:
        rules = (Vocabulary("embeddings.word_embeddings"),)
        super().__init__("embedding", stock_children("bert", model.bert, "embeddings"), rules)

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"input_ids", "token_type_ids", "position_ids"})

    def forward(self, activations: Activations, context: TokenContext) -> Activations:
        batch = context.batch
        hidden: Tensor = self.embeddings(
            input_ids=batch["input_ids"],
            token_type_ids=batch.get("token_type_ids"),
            position_ids=batch.get("position_ids"),
        )
        return (hidden,)


class _Encoder(Layer):
    block: nn.Module

    def __init__(self, model: Any, index: int) -> None:
        rules = (
            Region("block.attention.self"),
            Columns("block.attention.self.query"),
            Columns("block.attention.self.key"),
            Columns("block.attention.self.value"),
            Rows("block.attention.output.dense"),
            Region("block.intermediate"),
            Columns("block.intermediate.dense"),
            Rows("block.output.dense"),
        )
        block = model.bert.encoder.layer[index]
        super().__init__("encoder", {"block": (f"bert.encoder.layer.{index}", block)}, rules)

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"input_ids", "attention_mask"})

    def forward(self, activations: Activations, context: TokenContext) -> Activations:
        (hidden,) = activations
        return (self.block(hidden, context.mask),)


class _Head(Layer):
    """Takes the projection's bias from the projection, where it is used; ``cls.predictions`` only names it again."""

    transform: nn.Module
    decoder: nn.Module

    def __init__(self, model: Any) -> None:
        rules = (Region("decoder"), Columns("decoder"), VocabularyLoss("loss"))
        predictions = model.cls.predictions
        super().__init__("head", stock_children("cls.predictions", predictions, "transform", "decoder"), rules)
        self.one_bias = predictions.bias is predictions.decoder.bias
        self.loss, self.projection = CrossEntropy(), "decoder"

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"labels"})

    def forward(self, activations: Activations, context: TokenContext) -> Activations:
        (hidden,) = activations
        return (self.loss(self.decoder(self.transform(hidden)), context.batch["labels"]),)

    def stock_name(self, name: str) -> str:
        if name == "decoder.bias" and self.one_bias:  # checkpoints hold it under its other name
            return "cls.predictions.bias"
        return super().stock_name(name)


class Bert(LayeredModel):
    """Untied, the stock model has a second bias over the vocabulary that nothing uses: it is in no layer."""

    required = frozenset({"input_ids", "labels"})
    unused = ("cls.predictions.bias",)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        for flag in ("is_decoder", "add_cross_attention"):
            require(model, not getattr(model.config, flag, False), flag, "false (the BERT encoder)")
        self.config = model.config
        encoders = [_Encoder(model, index) for index in range(len(model.bert.encoder.layer))]
        self.layers = (_Embedding(model), *encoders, _Head(model))
        if model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight:
            uses = (Use(0, "embeddings.word_embeddings.weight"), Use(len(self.layers) - 1, "decoder.weight"))
            self.ties = (Tie(uses),)

    def context(self, batch: Batch, dtype: torch.dtype) -> TokenContext:
        ids = batch.get("input_ids")
        if ids is None:  # a stage with the head alone
            return TokenContext(batch, None)
        return TokenContext(batch, bidirectional_mask(self.config, ids, dtype, batch.get("attention_mask")))

    def why_undivided(self, index: int) -> str | None:
        return None

    def carried(self, index: int, samples: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return ((samples["input_ids"][0], self.config.hidden_size),)

    def targets(self, batch: Batch) -> int:
        return count_targets(batch["labels"])

    def example(self, rows: int, sequence_length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
        length = sequence_length or self.config.max_position_embeddings
        ids = random_tokens(rows, length, self.config.vocab_size, generator)
        return {"input_ids": ids, "labels": masked_labels(ids, generator)}


ADAPTER = Bert
