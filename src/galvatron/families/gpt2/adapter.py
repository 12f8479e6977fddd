"""GPT-2 (``GPT2LMHeadModel``): embedding, decoders, head; queries, keys and values come from one fused projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.families.adapters import (
    TokenContext,
    causal_mask,
    count_targets,
    random_tokens,
    require,
    stock_children,
)
from galvatron.families.context import causal_targets
from galvatron.families.given import refuse_own_loss
from galvatron.families.layer import Activations, Batch, CrossEntropy, Layer, LayeredModel, Tie, Use
from galvatron.families.rules import Attribute, Columns, Region, Rows, Vocabulary, VocabularyLoss, Whole

__all__ = ["ADAPTER", "Gpt2"]


class _Embedding(Layer):
    wte: nn.Module
    wpe: nn.Module
    drop: nn.Module

    def __init__(self, model: Any) -> None:
        modules = stock_children("transformer", model.transformer, "wte", "wpe", "drop")
        super().__init__("embedding", modules, (Vocabulary("wte"),))

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"input_ids", "token_type_ids", "position_ids"})

    def forward(self, activations: Activations, context: TokenContext) -> Activations:
        batch = context.batch
        ids, types, positions = batch["input_ids"], batch.get("token_type_ids"), batch.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden = self.wte(ids) + self.wpe(positions)
        if types is not None:
            hidden = hidden + self.wte(types)
        return (self.drop(hidden),)


class _Decoder(Layer):
    block: nn.Module

    def __init__(self, model: Any, index: int) -> None:
        rules = (
            Region("block.attn"),
            Columns("block.attn.c_attn", parts=3),
            Attribute("block.attn.split_size"),
            Rows("block.attn.c_proj"),
            Whole("block.attn.resid_dropout"),
            Region("block.mlp.c_fc", ("x",)),
            Columns("block.mlp.c_fc"),
            Rows("block.mlp.c_proj"),
        )
        super().__init__("decoder", {"block": (f"transformer.h.{index}", model.transformer.h[index])}, rules)

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"input_ids", "attention_mask", "position_ids"})

    def forward(self, activations: Activations, context: TokenContext) -> Activations:
        (hidden,) = activations
        return (self.block(hidden, attention_mask=context.mask),)


class _Head(Layer):
    ln_f: nn.Module
    lm_head: nn.Module

    def __init__(self, model: Any) -> None:
        modules = {"ln_f": ("transformer.ln_f", model.transformer.ln_f), "lm_head": ("lm_head", model.lm_head)}
        super().__init__("head", modules, (Region("lm_head"), Columns("lm_head"), VocabularyLoss("loss")))
        self.loss, self.projection = CrossEntropy(), "lm_head"

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"labels"})

    def forward(self, activations: Activations, context: TokenContext) -> Activations:
        (hidden,) = activations
        return (self.loss(self.lm_head(self.ln_f(hidden)), causal_targets(context.batch)),)


class Gpt2(LayeredModel):
    """Batches have ``input_ids`` and ``labels`` (the same tokens; the model shifts them), maybe masks or positions."""

    required = frozenset({"input_ids", "labels"})
    shifts_labels = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        refuse_own_loss(model, "ForCausalLM")
        require(model, not model.config.add_cross_attention, "add_cross_attention", "false")
        self.config = model.config
        decoders = [_Decoder(model, index) for index in range(len(model.transformer.h))]
        self.layers = (_Embedding(model), *decoders, _Head(model))
        if model.lm_head.weight is model.transformer.wte.weight:
            self.ties = (Tie((Use(0, "wte.weight"), Use(len(self.layers) - 1, "lm_head.weight"))),)

    def context(self, batch: Batch, dtype: torch.dtype) -> TokenContext:
        ids = batch.get("input_ids")
        if ids is None:  # a stage with the head alone
            return TokenContext(batch, None)
        mask = causal_mask(self.config, ids, dtype, batch.get("attention_mask"), batch.get("position_ids"))
        return TokenContext(batch, mask)

    def why_undivided(self, index: int) -> str | None:
        return None

    def separates_documents(self) -> bool:
        return True

    def carried(self, index: int, samples: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return ((samples["input_ids"][0], self.config.n_embd),)

    def targets(self, batch: Batch) -> int:
        return count_targets(batch["labels"][..., 1:])

    def example(self, rows: int, sequence_length: int | None, generator: torch.Generator) -> dict[str, Tensor]:
        length = sequence_length or self.config.max_position_embeddings
        ids = random_tokens(rows, length, self.config.vocab_size, generator)
        return {"input_ids": ids, "labels": ids.clone()}


ADAPTER = Gpt2
