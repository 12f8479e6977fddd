"""Models from a Hugging Face ``config.json``, without importing transformers.

Such a file leaves out what equals its class's default, so every field but ``model_type`` has one here too (those of
transformers 5). The heads are those of pre-training: masked or causal language modelling, image classification.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.files.reader import read_text
from galvatron.core.spec.model import ModelSpec, Training
from galvatron.families.bert.facts import Bert
from galvatron.families.fields import Fields
from galvatron.families.gpt2.facts import Gpt2
from galvatron.families.llama.facts import Llama
from galvatron.families.presets import Architecture
from galvatron.families.swin.facts import Swin
from galvatron.families.t5.facts import T5
from galvatron.families.vit.facts import Vit

__all__ = ["HUGGINGFACE_TYPES", "model_of_config", "read_content", "read_huggingface"]

_LABELS = 2
"""Classes of a configuration that names none."""


def read_huggingface(path: Path, name: str, training: Training) -> ModelSpec:
    """Read a ``config.json``, or the one in a folder. The model keeps all of the file, known fields and others."""
    return model_of_config(read_content(path), path / "config.json" if path.is_dir() else path, name, training)


def read_content(path: Path) -> dict[str, Any]:
    """The content of a ``config.json``, or of the one in a folder, of whatever architecture."""
    if path.is_dir():
        path = path / "config.json"
    text = read_text(path, "a Hugging Face configuration in JSON")
    try:
        content = json.loads(text)  # NaN passes, so that the error names the field that holds it
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: is not JSON ({error}); expected a Hugging Face configuration") from None
    if not isinstance(content, dict):
        raise InvalidInput(f"{path}: holds a {type(content).__name__}; expected an object with a field model_type")
    return content


def model_of_config(content: dict[str, Any], path: Path, name: str, training: Training) -> ModelSpec:
    """The model that a configuration describes; ``path`` says where it came from, for errors."""
    fields = Fields(path, content)
    model_type = fields.text("model_type")
    if model_type not in _READERS:
        known = ", ".join(_READERS)
        close = difflib.get_close_matches(model_type, _READERS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "describe other models layer by layer in a .toml file"
        raise fields.error("model_type", model_type, f"one of {known}; {hint}")
    model = _READERS[model_type](fields).spec(name, training)
    try:
        json.dumps(content, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise InvalidInput(
            f"{path}: cannot be part of a plan ({error}); expected numbers that are finite and text that is Unicode"
        ) from None
    return replace(model, config=content)


def _bert(fields: Fields) -> Bert:
    for flag in ("is_decoder", "add_cross_attention"):
        if fields.flag(flag, False):
            raise fields.error(flag, True, "false: only the BERT encoder is supported")
    hidden, heads = _hidden_and_heads(fields, ("hidden_size",), 768, ("num_attention_heads",), 12)
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


def _gpt2(fields: Fields) -> Gpt2:
    if fields.flag("add_cross_attention", False):
        raise fields.error("add_cross_attention", True, "false: cross-attention in GPT-2 is not supported")
    hidden, heads = _hidden_and_heads(fields, ("n_embd", "hidden_size"), 768, ("n_head", "num_attention_heads"), 12)
    return Gpt2(
        hidden=hidden,
        layers=fields.layers("n_layer", "num_hidden_layers", default=12),
        heads=heads,
        inner=fields.optional_count("n_inner"),
        vocabulary=fields.count("vocab_size", default=50257),
        positions=fields.count("n_positions", "max_position_embeddings", default=1024),
        activation=fields.activation("activation_function", default="gelu_new"),
        embedding_dropout=fields.probability("embd_pdrop", default=0.1),
        hidden_dropout=fields.probability("resid_pdrop", default=0.1),
        attention_dropout=fields.probability("attn_pdrop", default=0.1),
        tied=fields.flag("tie_word_embeddings", True),
    )


def _llama(fields: Fields) -> Llama:
    hidden, heads = _hidden_and_heads(fields, ("hidden_size",), 4096, ("num_attention_heads",), 32)
    kv_heads = fields.optional_count("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    return Llama(
        hidden=hidden,
        layers=fields.layers("num_hidden_layers", default=32),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.optional_count("head_dim"),
        inner=fields.count("intermediate_size", default=11008),
        vocabulary=fields.count("vocab_size", default=32000),
        positions=fields.count("max_position_embeddings", default=2048),
        activation=fields.activation("hidden_act", default="silu"),
        attention_bias=fields.flag("attention_bias", False),
        feed_forward_bias=fields.flag("mlp_bias", False),
        attention_dropout=fields.probability("attention_dropout", default=0.0),
        tied=fields.flag("tie_word_embeddings", False),
    )


def _t5(fields: Fields) -> T5:
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


def _vit(fields: Fields) -> Vit:
    hidden, heads = _hidden_and_heads(fields, ("hidden_size",), 768, ("num_attention_heads",), 12)
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
        labels=fields.labels(default=_LABELS),
        qkv_bias=fields.flag("qkv_bias", True),
        activation=fields.activation("hidden_act", default="gelu"),
        hidden_dropout=fields.probability("hidden_dropout_prob", default=0.0),
        attention_dropout=fields.probability("attention_probs_dropout_prob", default=0.0),
    )


def _swin(fields: Fields) -> Swin:
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
        labels=fields.labels(default=_LABELS),
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


def _hidden_and_heads(
    fields: Fields, hidden_keys: tuple[str, ...], hidden: int, head_keys: tuple[str, ...], heads: int
) -> tuple[int, int]:
    hidden, heads = fields.count(*hidden_keys, default=hidden), fields.count(*head_keys, default=heads)
    if hidden % heads:
        raise fields.error(head_keys[0], heads, f"a divisor of {hidden_keys[0]} ({hidden})")
    return hidden, heads


_READERS: dict[str, Callable[[Fields], Architecture]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "vit": _vit,
    "swin": _swin,
}
HUGGINGFACE_TYPES = frozenset(_READERS)
"""Values of ``model_type`` that have a family here."""
