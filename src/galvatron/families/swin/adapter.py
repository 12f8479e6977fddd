"""Swin (``SwinForImageClassification``): embedding, the blocks of stage 1, merge1, those of stage 2 … and the head.

Windows are cut from the image's grid of tokens, so every block knows its stage's grid; it follows from the
configuration, because later stages of a pipeline never see the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from galvatron.core.errors import InvalidInput
from galvatron.families.adapters import ClassHead, ImageContext, ImageModel, sides, stock_children
from galvatron.families.layer import Activations, Layer
from galvatron.families.rules import Columns, Region, Rows, Table

__all__ = ["ADAPTER", "Swin"]

_Grid = tuple[int, int]
"""Rows and columns of tokens."""


class _Embedding(Layer):
    embeddings: nn.Module

    def __init__(self, model: Any) -> None:
        super().__init__("embedding", stock_children("swin", model.swin, "embeddings"))
        self.image = sides(model.config.image_size)

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset({"pixel_values"})

    def forward(self, activations: Activations, context: ImageContext) -> Activations:
        pixels = context.batch["pixel_values"]
        given = tuple(pixels.shape[-2:])
        if given != self.image:
            raise InvalidInput(f"images of {given} pixels; expected {self.image}, the image_size of the configuration")
        hidden, _ = self.embeddings(pixels.to(context.dtype))
        return (hidden,)


class _Block(Layer):
    block: nn.Module

    def __init__(self, kind: str, name: str, block: nn.Module, grid: _Grid) -> None:
        rules = (
            Region("block.attention"),
            Columns("block.attention.q_proj"),
            Columns("block.attention.k_proj"),
            Columns("block.attention.v_proj"),
            Table("block.attention.relative_position_bias.relative_position_bias_table", dim=1),
            Rows("block.attention.o_proj"),
            Region("block.mlp"),
            Columns("block.mlp.fc1"),
            Rows("block.mlp.fc2"),
        )
        super().__init__(kind, {"block": (name, block)}, rules)
        self.grid = grid

    def forward(self, activations: Activations, context: ImageContext) -> Activations:
        (hidden,) = activations
        return (self.block(hidden, self.grid)[0],)


class _Merge(Layer):
    merge: nn.Module

    def __init__(self, kind: str, name: str, merge: nn.Module, grid: _Grid) -> None:
        super().__init__(kind, {"merge": (name, merge)})
        self.grid = grid

    def forward(self, activations: Activations, context: ImageContext) -> Activations:
        (hidden,) = activations
        return (self.merge(hidden, self.grid),)


class _Head(ClassHead):
    layernorm: nn.Module
    pooler: nn.Module
    classifier: nn.Module

    def __init__(self, model: Any) -> None:
        modules = stock_children("swin", model.swin, "layernorm", "pooler")
        super().__init__({**modules, "classifier": ("classifier", model.classifier)})

    def logits(self, hidden: Tensor) -> Tensor:
        pooled = self.pooler(self.layernorm(hidden).transpose(1, 2))
        logits: Tensor = self.classifier(torch.flatten(pooled, 1))
        return logits


class Swin(ImageModel):
    """Batches have ``pixel_values`` and ``labels``."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        pairs = zip(sides(self.config.image_size), sides(self.config.patch_size), strict=True)
        rows, columns = (-(-side // patch) for side, patch in pairs)
        layers: list[Layer] = [_Embedding(model)]
        width = self.config.embed_dim
        leaving = [(rows * columns, width)]
        for number, stage in enumerate(model.swin.encoder.layers, start=1):
            name = f"swin.encoder.layers.{number - 1}"
            for index, block in enumerate(stage.blocks):
                layers.append(_Block(f"stage{number}", f"{name}.blocks.{index}", block, (rows, columns)))
                leaving.append((rows * columns, width))
            if stage.downsample is not None:
                layers.append(_Merge(f"merge{number}", f"{name}.downsample", stage.downsample, (rows, columns)))
                rows, columns, width = (rows + 1) // 2, (columns + 1) // 2, 2 * width
                leaving.append((rows * columns, width))
        self.layers = (*layers, _Head(model))
        self._leaving = tuple(leaving)

    def carried(self, index: int, samples: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        return (self._leaving[index - 1],)


ADAPTER = Swin
