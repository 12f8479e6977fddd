"""Swin (``SwinForImageClassification``): stages of windowed attention, halving the resolution in between.

Layers: embedding, the blocks of stage 1 (all named ``stage1``), ``merge1``, ``stage2`` … and the head. Every second
block shifts its windows, which only changes the mask it adds: blocks of a stage are treated as equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.model import Attention, LayerSpec, ModelSpec, Training
from galvatron.families.facts.blocks import (
    AttentionShape,
    FeedForwardShape,
    attention,
    class_head,
    collectives,
    dropout_active,
    feed_forward,
    paper_block,
    refuse_sequence_length,
)
from galvatron.families.facts.ops import Op, Split, dropout, layer, layer_norm, linear, residual
from galvatron.families.family import Family
from galvatron.families.fields import Fields

__all__ = ["FAMILY", "Swin"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Swin:
    """Hyper-parameters; the defaults are Hugging Face's."""

    hidden: int = 96
    """Of the first stage; each merge doubles it."""
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 7
    inner_ratio: float = 4.0
    image: tuple[int, int] = (224, 224)
    patch: tuple[int, int] = (4, 4)
    channels: int = 3
    labels: int = 1000
    qkv_bias: bool = True
    absolute_positions: bool = False
    activation: str = "gelu"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    @property
    def config(self) -> dict[str, Any]:
        """Hugging Face's configuration; whole residual branches are not dropped, as no other family does so."""
        return {
            "model_type": "swin",
            "architectures": ["SwinForImageClassification"],
            "embed_dim": self.hidden,
            "depths": list(self.depths),
            "num_heads": list(self.heads),
            "window_size": self.window,
            "mlp_ratio": self.inner_ratio,
            "image_size": list(self.image),
            "patch_size": list(self.patch),
            "num_channels": self.channels,
            "num_labels": self.labels,
            "qkv_bias": self.qkv_bias,
            "use_absolute_embeddings": self.absolute_positions,
            "hidden_act": self.activation,
            "hidden_dropout_prob": self.hidden_dropout,
            "attention_probs_dropout_prob": self.attention_dropout,
            "drop_path_rate": 0.0,
        }

    def spec(self, name: str, training: Training) -> ModelSpec:
        refuse_sequence_length(training, model=name)
        layers = [self._embedding(training)]
        for stage, (grid, depth) in enumerate(zip(self.grids, self.depths, strict=True)):
            layers += [self._block(stage, grid, training)] * depth
            if stage + 1 < len(self.depths):
                layers.append(self._merge(stage, grid, training))
        rows, columns = self.grids[-1]
        width = self.hidden << (len(self.depths) - 1)
        layers.append(class_head(rows * columns, width, self.labels, training, pooled=True))
        return ModelSpec(name=name, family="swin", layers=tuple(layers), training=training, config=self.config)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of tokens in each stage; patches and merges pad to whole tokens."""
        rows, columns = (-(-side // layered_model) for side, layered_model in zip(self.image, self.patch, strict=True))
        grids = []
        for _ in self.depths:
            grids.append((rows, columns))
            rows, columns = (rows + 1) // 2, (columns + 1) // 2
        return tuple(grids)

    def _embedding(self, training: Training) -> LayerSpec:
        rows, columns = self.grids[0]
        tokens, element = rows * columns, training.precision.bytes
        pixels = self.channels * self.patch[0] * self.patch[1]
        patches = Op(
            parameters=(pixels + 1) * self.hidden + (tokens * self.hidden if self.absolute_positions else 0),
            flops=2 * tokens * pixels * self.hidden,
            replicated=self.channels * self.image[0] * self.image[1] * element,
        )
        norm = layer_norm(tokens, self.hidden, element=element)
        drop = dropout(tokens * self.hidden, active=dropout_active(training, self.hidden_dropout), element=element)
        return layer(
            "embedding",
            (patches, norm, *drop),
            boundary=tokens * self.hidden * element,
            tensor_parallel=None,
        )

    def _block(self, stage: int, grid: tuple[int, int], training: Training) -> LayerSpec:
        element = training.precision.bytes
        hidden, heads = self.hidden << stage, self.heads[stage]
        tokens = grid[0] * grid[1]
        boundary = tokens * hidden * element
        # Attention works on whole windows: the grid is padded to them.
        rows, columns = (-(-side // self.window) * self.window for side in grid)
        windowed, area = rows * columns, self.window**2
        shifts = min(grid) > self.window
        norm = layer_norm(tokens, hidden, element=element)
        drop = dropout(tokens * hidden, active=dropout_active(training, self.hidden_dropout), element=element)
        attend = attention(
            AttentionShape(
                hidden=hidden,
                heads=heads,
                kv_heads=heads,
                head_dim=hidden // heads,
                queries=windowed,
                keys=windowed,
                span=area,
                bias=self.qkv_bias,
                output_bias=True,
                dropout=dropout_active(training, self.attention_dropout),
                fp32_softmax=True,
                # A shifted block hands its fused kernel a mask for every window, so half of the blocks keep one map.
                fused_bias_bytes=heads * windowed * area * element // 2 if shifts else 0,
                table=(2 * self.window - 1) ** 2 * heads,
            ),
            training,
        )
        feed = feed_forward(
            FeedForwardShape(
                tokens=tokens,
                hidden=hidden,
                inner=int(self.inner_ratio * hidden),
                activation=self.activation,
                bias=True,
            ),
            training,
        )
        # The paper's Table 1 shows half a boundary tensor more a block (18.14 MiB in stage 3) than these save.
        extra = (Op(split=boundary // 2),) if training.attention is Attention.PAPER else ()
        block = layer(
            f"stage{stage + 1}",
            (*extra, *residual((norm, *attend, *drop), boundary), *residual((norm, *feed, *drop), boundary)),
            boundary=boundary,
            tensor_parallel=collectives(boundary, forward=2, backward=2, divides=(heads,)),
        )
        return paper_block(block, training)

    def _merge(self, stage: int, grid: tuple[int, int], training: Training) -> LayerSpec:
        # With the batch sizes of its pure TP, the paper must have split the reduction; ours runs it whole.
        splits = training.attention is Attention.PAPER
        hidden, element = self.hidden << stage, training.precision.bytes
        tokens = ((grid[0] + 1) // 2) * ((grid[1] + 1) // 2)
        norm = layer_norm(tokens, 4 * hidden, element=element)
        split = Split.ROWS if splits else Split.WHOLE
        reduction = linear(tokens, 4 * hidden, 2 * hidden, split, element=element, bias=False)
        boundary = tokens * 2 * hidden * element
        # Backward gathers the norm's gradient: twice the result's size, at half an all-reduce's volume.
        tensor_parallel = collectives(boundary, forward=1, backward=1) if splits else None
        return layer(f"merge{stage + 1}", (norm, reduction), boundary=boundary, tensor_parallel=tensor_parallel)


def _read(fields: Fields) -> Swin:
    depths = fields.counts("depths", default=(2, 2, 6, 2))
    heads = fields.counts("num_heads", default=(3, 6, 12, 24))
    hidden = fields.count("embed_dim", default=96)
    if len(heads) != len(depths):
        raise fields.error("num_heads", list(heads), f"as many numbers as depths has ({len(depths)})")
    for stage, count in enumerate(heads):
        if (hidden << stage) % count:
            raise fields.error(f"num_heads[{stage}]", count, f"a divisor of the stage's width {hidden << stage}")
    swin = Swin(
        hidden=hidden,
        depths=depths,
        heads=heads,
        window=fields.count("window_size", default=7),
        inner_ratio=fields.positive("mlp_ratio", default=4.0),
        image=fields.pair("image_size", default=224),
        patch=fields.pair("patch_size", default=4),
        channels=fields.count("num_channels", default=3),
        labels=fields.labels(),
        qkv_bias=fields.flag("qkv_bias", True),
        absolute_positions=fields.flag("use_absolute_embeddings", False),
        activation=fields.activation("hidden_act", default="gelu"),
        hidden_dropout=fields.probability("hidden_dropout_prob", default=0.0),
        attention_dropout=fields.probability("attention_probs_dropout_prob", default=0.0),
    )
    for stage, grid in enumerate(swin.grids):
        if min(grid) < swin.window:
            rows, columns = grid
            raise fields.error(
                "window_size", swin.window, f"at most {min(grid)}: stage {stage + 1} has {rows}×{columns} tokens"
            )
    return swin


def _huge(depth: int) -> Swin:
    if depth < 7:
        raise InvalidInput(f"swin-huge-{depth}: three stages have 2 layers each, so the depth must be at least 7")
    # The paper runs 8-way TP on every stage, so 8 must divide the heads of the first (10, as the width suggests, does
    # not).
    return Swin(hidden=320, depths=(2, 2, depth - 6, 2), heads=(8, 16, 32, 64))


FAMILY = Family(
    model_type="swin",
    head_class="SwinForImageClassification",
    read=_read,
    by_depth={"swin-huge": _huge},
    known={
        "swin-base": Swin(hidden=128, depths=(2, 2, 18, 2), heads=(4, 8, 16, 32)),
        "swin-large": Swin(hidden=192, depths=(2, 2, 18, 2), heads=(6, 12, 24, 48)),
    },
    tiny={"swin-tiny-demo": Swin(hidden=32, depths=(2, 2), heads=(2, 4), image=(112, 112), labels=10)},
    rank=6,
    paper_rank=4,
)
