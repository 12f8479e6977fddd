"""The BERTs that benchmarks of the runtime train, and their training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Size", "Step"]

Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Size:
    """A BERT, and the batch it is trained with."""

    hidden: int
    layers: int
    heads: int
    length: int
    batch: int
    vocabulary: int = 30522

    def config(self, *, tied: bool) -> dict[str, Any]:
        return {
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.hidden,
            "max_position_embeddings": self.length,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "tie_word_embeddings": tied,
        }
