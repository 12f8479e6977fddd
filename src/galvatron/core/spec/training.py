"""How a model is trained, as far as its memory and time depend on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from galvatron.core.spec.figures import check_facts
from galvatron.core.spec.optimizer import ADAMW
from galvatron.core.spec.tuning import Lora

__all__ = ["DEFAULT_LONGEST", "Attention", "Precision", "Training"]

DEFAULT_LONGEST = 8192
"""Tokens of a sample where nobody says how many, if the model can take more: models for 128k are trained with fewer."""


class Precision(StrEnum):
    """Arithmetic of training."""

    FP32 = "fp32"
    """Everything in fp32: 4-byte activations, 16 bytes of states a parameter with Adam."""
    TF32 = "tf32"
    """As fp32, but matrix products round their operands to TF32 (10 bits after the point) on GPUs that have it."""
    BF16 = "bf16"
    """bf16 working parameters and activations, with fp32 masters, gradient reduction and Adam moments."""

    @property
    def bytes(self) -> int:
        """Bytes of one activation or working parameter; gradients are reduced in fp32 either way."""
        return 2 if self is Precision.BF16 else 4


class Attention(StrEnum):
    """How attention is computed, which decides what it saves for backward."""

    FUSED = "fused"
    """Flash or SDPA kernels: no map of size seq² is saved, only a log-sum-exp per row."""
    EAGER = "eager"
    """As Hugging Face's eager attention: the probabilities are saved (with dropout also mask and dropped copy)."""
    PAPER = "paper"
    """As the paper's models of 2022 ran it: eager, and the scores are saved as well (its Table 1 shows two maps)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How the model is trained, as far as memory and time depend on it."""

    precision: Precision = Precision.FP32
    attention: Attention = Attention.FUSED
    dropout: bool | None = None
    """Whether dropout is active; None: as the model's own configuration says."""
    sequence_length: int | None = None
    """Tokens a sample for language models; None: the model's own maximum, at most :data:`DEFAULT_LONGEST`."""
    optimizer: str = ADAMW.name
    """By its name in :data:`galvatron.core.spec.optimizer.OPTIMIZERS`."""
    compile: bool = False
    """Whether the computation of each block is compiled."""
    image_size: int | None = None
    """Pixels of a side of the one image in each sample, for models of images and text; None: text alone, or images of
    an example batch."""
    image_tokens: int | None = None
    """How many tokens of a sample are those of its images; None: it has none."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters, or of modules that hold them, that do not train."""
    train_only: tuple[str, ...] = ()
    """Patterns of those that do, if any is given: all others do not train."""
    float8: bool = False
    """Whether linear layers may be computed in float8."""
    lora: Lora | None = None
    """Adapters that train, while all that the model has itself does not; None: there are none."""

    def __post_init__(self) -> None:
        check_facts(self, "training")

    @property
    def tunes(self) -> bool:
        """Whether some parameters are frozen."""
        return bool(self.freeze or self.train_only or self.lora)

    def untuned(self) -> Training:
        """The same with nothing frozen and nothing added."""
        return replace(self, freeze=(), train_only=(), lora=None)

    def to_dict(self) -> dict[str, Any]:
        """As plan files have it. What came later and is not used is left out: digests and files of those plans stay the
        same."""
        facts = asdict(self)
        if not self.compile:
            del facts["compile"]
        if self.optimizer == ADAMW.name:
            del facts["optimizer"]
        if not self.float8:
            del facts["float8"]
        if self.lora is not None and self.lora.full is None:
            del facts["lora"]["full"]
        kept = {name: own for name, own in facts.items() if own is not None or not name.startswith("image_")}
        return kept if self.tunes else {name: own for name, own in kept.items() if name not in _TUNING}


_TUNING = frozenset({"freeze", "train_only", "lora"})
