"""What the table trains and on what: the paper's models in full, or tiny ones that show everything on CPU processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Attention, Cluster, ModelProfile, ModelSpec, Precision, Training
from galvatron.families import load_cluster, load_model, load_profile

__all__ = ["MODELS", "Workload", "full", "tiny", "tiny_cluster"]

MODELS = ("bert-huge-32", "vit-huge-32", "t5-large-32", "swin-huge-32")
_TRAINING = Training(precision=Precision.FP32, attention=Attention.EAGER)
"""As the paper trained: fp32, eager attention. Dropout is as each model's own configuration has it."""
_SEQUENCE = 512


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with what was measured of its layers."""

    model: ModelSpec
    profile: ModelProfile | None

    @property
    def family(self) -> str:
        return self.model.family


def full(name: str, profiles: Path | None) -> Workload:
    """A model of the paper; its profile is ``<name>.toml`` in the folder, and must be there if there is a folder."""
    _check(name)
    takes_tokens = name.startswith(("bert", "t5"))
    training = replace(_TRAINING, sequence_length=_SEQUENCE) if takes_tokens else _TRAINING
    if profiles is None:
        return Workload(model=load_model(name, training), profile=None)
    path = profiles / f"{name}.toml"
    if not path.exists():
        raise InvalidInput(
            f"profiles: {str(path)!r} does not exist; measure it with galvatron profile model {name} --virtual 8 "
            f"--cluster CLUSTER --precision fp32 --attention eager --output {path} (as docs/evaluation.md has it), or "
            "leave --profiles out to price layers by operations"
        )
    return Workload(model=load_model(name, training), profile=load_profile(path))


_TINY: dict[str, dict[str, Any]] = {
    "bert-huge-32": {
        "model_type": "bert",
        "vocab_size": 203,
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 256,
        "max_position_embeddings": 32,
    },
    "vit-huge-32": {
        "model_type": "vit",
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 256,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 10,
    },
    "t5-large-32": {
        "model_type": "t5",
        "vocab_size": 203,
        "d_model": 64,
        "d_kv": 8,
        "d_ff": 256,
        "num_layers": 3,
        "num_decoder_layers": 3,
        "num_heads": 8,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
    "swin-huge-32": {
        "model_type": "swin",
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 32,
        "depths": [2, 2],
        "num_heads": [4, 8],
        "window_size": 4,
        "num_labels": 10,
    },
}
"""Under the names of the models they stand for."""


def tiny(name: str) -> Workload:
    """A tiny model of the same family, under the same name."""
    _check(name)
    takes_tokens = name.startswith(("bert", "t5"))
    training = replace(_TRAINING, sequence_length=32) if takes_tokens else _TRAINING
    return Workload(model=replace(load_model(_TINY[name], training), name=name), profile=None)


def tiny_cluster(devices: int) -> Cluster:
    """CPU processes; only their tensors count as memory."""
    return replace(load_cluster("cpu-4").shrunk(devices), reserved_bytes=0)


def _check(name: str) -> None:
    if name not in MODELS:
        raise InvalidInput(f"models: {name!r} given; expected some of {', '.join(MODELS)}")
