"""ViT (``ViTForImageClassification``): pre-norm encoder over image patches and a class token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from galvatron.core.spec.model import ModelSpec, Training
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
from galvatron.families.facts.ops import Op, dropout, layer, layer_norm, residual
from galvatron.families.family import Family
from galvatron.families.fields import Fields

__all__ = ["FAMILY", "Vit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vit:
    """Hyper-parameters; the defaults are Hugging Face's."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    inner: int = 3072
    image: tuple[int, int] = (224, 224)
    patch: tuple[int, int] = (16, 16)
    channels: int = 3
    labels: int = 1000
    qkv_bias: bool = True
    activation: str = "gelu"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    @property
    def config(self) -> dict[str, Any]:
        """Hugging Face's configuration."""
        return {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.inner,
            "image_size": list(self.image),
            "patch_size": list(self.patch),
            "num_channels": self.channels,
            "num_labels": self.labels,
            "qkv_bias": self.qkv_bias,
            "hidden_act": self.activation,
            "hidden_dropout_prob": self.hidden_dropout,
            "attention_probs_dropout_prob": self.attention_dropout,
        }

    def spec(self, name: str, training: Training) -> ModelSpec:
        refuse_sequence_length(training, model=name)
        patches = (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1])
        tokens = patches + 1
        element = training.precision.bytes
        cells = tokens * self.hidden
        boundary = cells * element
        drop = dropout(cells, active=dropout_active(training, self.hidden_dropout), element=element)
        norm = layer_norm(tokens, self.hidden, element=element)
        pixels = self.channels * self.patch[0] * self.patch[1]
        embedding = layer(
            "embedding",
            (
                Op(
                    # Convolution over patches with bias, class token, positions.
                    parameters=(pixels + 1) * self.hidden + self.hidden + tokens * self.hidden,
                    flops=2 * patches * pixels * self.hidden,
                    replicated=self.channels * self.image[0] * self.image[1] * element,
                ),
                *drop,
            ),
            boundary=boundary,
            tensor_parallel=None,
        )
        attend = attention(
            AttentionShape(
                hidden=self.hidden,
                heads=self.heads,
                kv_heads=self.heads,
                head_dim=self.hidden // self.heads,
                queries=tokens,
                keys=tokens,
                span=tokens,
                bias=self.qkv_bias,
                output_bias=True,
                dropout=dropout_active(training, self.attention_dropout),
                fp32_softmax=True,
            ),
            training,
        )
        feed = feed_forward(
            FeedForwardShape(
                tokens=tokens, hidden=self.hidden, inner=self.inner, activation=self.activation, bias=True
            ),
            training,
        )
        encoder = layer(
            "encoder",
            (*residual((norm, *attend, *drop), boundary), *residual((norm, *feed, *drop), boundary)),
            boundary=boundary,
            tensor_parallel=collectives(
                boundary, forward=2, backward=2, divides=(self.heads,), sequence_divides=(tokens,)
            ),
        )
        head = class_head(tokens, self.hidden, self.labels, training, pooled=False)
        blocks = [paper_block(encoder, training)] * self.layers
        layers = (embedding, *blocks, head)
        return ModelSpec(name=name, family="vit", layers=layers, training=training, config=self.config)


def _read(fields: Fields) -> Vit:
    hidden, heads = fields.hidden_and_heads(("hidden_size",), 768, ("num_attention_heads",), 12)
    image, patch = fields.pair("image_size", default=224), fields.pair("patch_size", default=16)
    if patch[0] > image[0] or patch[1] > image[1]:
        raise fields.error("patch_size", list(patch), f"at most the image_size {list(image)}")
    return Vit(
        hidden=hidden,
        layers=fields.layers("num_hidden_layers", default=12),
        heads=heads,
        inner=fields.count("intermediate_size", default=3072),
        image=image,
        patch=patch,
        channels=fields.count("num_channels", default=3),
        labels=fields.labels(),
        qkv_bias=fields.flag("qkv_bias", True),
        activation=fields.activation("hidden_act", default="gelu"),
        hidden_dropout=fields.probability("hidden_dropout_prob", default=0.0),
        attention_dropout=fields.probability("attention_probs_dropout_prob", default=0.0),
    )


def _huge(depth: int) -> Vit:
    return Vit(hidden=1280, layers=depth, heads=16, inner=5120)


FAMILY = Family(
    model_type="vit",
    head_class="ViTForImageClassification",
    read=_read,
    by_depth={"vit-huge": _huge},
    # Heads and patch size are not in the paper: these fit its activation sizes.
    paper={"vit-xhuge": Vit(hidden=2560, layers=128, heads=32, inner=10240)},
    known={"vit-base": Vit(), "vit-large": Vit(hidden=1024, layers=24, heads=16, inner=4096)},
    tiny={"vit-tiny": Vit(hidden=192, layers=4, heads=3, inner=768, image=(64, 64), labels=10)},
    rank=5,
    paper_rank=2,
)
