"""ViT (``ViTForImageClassification``): embedding of patches and class token, encoders, head on the class token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from galvatron.families.adapters import ClassHead, ImageContext, ImageModel, stock_children
from galvatron.families.layer import Activations, Layer
from galvatron.families.rules import Columns, Region, Rows

__all__ = ["ADAPTER", "Vit"]


class _Embedding(Layer):
    embeddings: nn.Module

    def __init__(self, model: Any) -> None:
        super().__init__("embedding", stock_children("vit", model.vit, "embeddings"))

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"pixel_values"})

    def forward(self, activations: Activations, context: ImageContext) -> Activations:
        return (self.embeddings(context.batch["pixel_values"].to(context.dtype)),)


class _Encoder(Layer):
    block: nn.Module

    def __init__(self, model: Any, index: int) -> None:
        rules = (
            Region("block.attention"),
            Columns("block.attention.q_proj"),
            Columns("block.attention.k_proj"),
            Columns("block.attention.v_proj"),
            Rows("block.attention.o_proj"),
            Region("block.mlp"),
            Columns("block.mlp.fc1"),
            Rows("block.mlp.fc2"),
        )
        super().__init__("encoder", {"block": (f"vit.layers.{index}", model.vit.layers[index])}, rules)

    def forward(self, activations: Activations, context: ImageContext) -> Activations:
        (hidden,) = activations
        return (self.block(hidden),)


class _Head(ClassHead):
    layernorm: nn.Module
    classifier: nn.Module

    def __init__(self, model: Any) -> None:
        modules = {"layernorm": ("vit.layernorm", model.vit.layernorm), "classifier": ("classifier", model.classifier)}
        super().__init__(modules)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.layernorm(hidden)[:, 0])
        return logits


class Vit(ImageModel):
    """Batches have ``pixel_values`` and ``labels``."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        encoders = [_Encoder(model, index) for index in range(len(model.vit.layers))]
        self.layers = (_Embedding(model), *encoders, _Head(model))
        self._tokens = model.vit.embeddings.patch_embeddings.num_patches + 1

    def carried(self, index: int, samples: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return ((self._tokens, self.config.hidden_size),)


ADAPTER = Vit
