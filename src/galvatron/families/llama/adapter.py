"""Llama (``LlamaForCausalLM``): embedding, decoders with rotary positions and grouped key/value heads, head.

How a decoder's weights are split is what transformers' own plan says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.families.adapters import (
    causal_mask,
    count_targets,
    random_tokens,
    shape_of,
    stock_children,
)
from galvatron.families.context import causal_targets, rotation_by_length
from galvatron.families.generic.tensor_plan import NoTensorParallelism, block_rules, rules_within
from galvatron.families.given import refuse_own_loss
from galvatron.families.layer import Activations, Batch, CrossEntropy, Layer, LayeredModel, Tie, Use
from galvatron.families.rules import Columns, Region, Rule, Vocabulary, VocabularyLoss

__all__ = ["ADAPTER", "Llama"]


@dataclass(frozen=True, slots=True)
class _Context:
    batch: Batch
    mask: Any = None
    """A tensor, FlexAttention's block mask, or None where the kernel masks by itself."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosine and sine for each position; the same for all decoders."""


class _Embedding(Layer):
    embed_tokens: nn.Module

    def __init__(self, model: Any) -> None:
        modules = stock_children("model", model.model, "embed_tokens")
        super().__init__("embedding", modules, (Vocabulary("embed_tokens"),))

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"input_ids"})

    def forward(self, activations: Activations, context: _Context) -> Activations:
        return (self.embed_tokens(context.batch["input_ids"]),)


class _Decoder(Layer):
    block: nn.Module

    def __init__(self, model: Any, index: int) -> None:
        name = f"model.layers.{index}"
        rules = (
            Region("block.self_attn"),
            Region("block.mlp", ("x",)),
            *rules_within("block", _block_rules(model, name)),
        )
        super().__init__("decoder", {"block": (name, model.model.layers[index])}, rules)

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"input_ids", "attention_mask", "position_ids"})

    def forward(self, activations: Activations, context: _Context) -> Activations:
        (hidden,) = activations
        return (self.block(hidden, attention_mask=context.mask, position_embeddings=context.rotation),)


def _block_rules(model: Any, name: str) -> tuple[Rule, ...]:
    try:
        return block_rules(model, name)
    except NoTensorParallelism as reason:
        raise InvalidInput(
            f"{type(model).__name__}: {name} is not as its class made it ({reason}); plan the model as it is, with "
            "galvatron.plan(galvatron.describe(model, batch), …)"
        ) from None


class _Head(Layer):
    norm: nn.Module
    lm_head: nn.Module

    def __init__(self, model: Any) -> None:
        modules = {"norm": ("model.norm", model.model.norm), "lm_head": ("lm_head", model.lm_head)}
        super().__init__("head", modules, (Region("lm_head"), Columns("lm_head"), VocabularyLoss("loss")))
        self.loss, self.projection = CrossEntropy(), "lm_head"

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"labels"})

    def forward(self, activations: Activations, context: _Context) -> Activations:
        (hidden,) = activations
        return (self.loss(self.lm_head(self.norm(hidden)), causal_targets(context.batch)),)


class Llama(LayeredModel):
    """Batches have ``input_ids`` and ``labels`` (the same tokens; the model shifts them), maybe masks or positions."""

    required = frozenset({"input_ids", "labels"})
    shifts_labels = True
    shared_modules = ("model.rotary_emb",)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        refuse_own_loss(model, "ForCausalLM")
        self.config = model.config
        self.rotary = model.model.rotary_emb
        decoders = [_Decoder(model, index) for index in range(len(model.model.layers))]
        self.layers = (_Embedding(model), *decoders, _Head(model))
        if getattr(model.lm_head, "weight", None) is model.model.embed_tokens.weight:
            self.ties = (Tie((Use(0, "embed_tokens.weight"), Use(len(self.layers) - 1, "lm_head.weight"))),)

    def context(self, batch: Batch, dtype: torch.dtype) -> _Context:
        ids, positions = batch.get("input_ids"), batch.get("position_ids")
        if ids is None:  # a stage with the head alone
            return _Context(batch)
        mask = causal_mask(self.config, ids, dtype, batch.get("attention_mask"), positions)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return _Context(batch, mask, self.rotary(shape_of(ids, dtype), position_ids=positions))

    def why_undivided(self, index: int) -> str | None:
        return rotation_by_length(self.model)

    def separates_documents(self) -> bool:
        return True

    def carried(self, index: int, samples: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return ((samples["input_ids"][0], self.config.hidden_size),)

    def targets(self, batch: Batch) -> int:
        return count_targets(batch["labels"][..., 1:])

    def example(self, rows: int, sequence_length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
        length = sequence_length or self.config.max_position_embeddings
        ids = random_tokens(rows, length, self.config.vocab_size, generator)
        return {"input_ids": ids, "labels": ids.clone()}


ADAPTER = Llama
