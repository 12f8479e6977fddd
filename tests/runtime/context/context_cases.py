"""Cases with samples that are long enough to be divided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from oracle import Case
from torch import Tensor

__all__ = ["ContextCase"]


@dataclass(frozen=True, kw_only=True)
class ContextCase(Case):
    """A case with longer samples."""

    tokens: int = 24
    documents: bool = False
    """Samples are several documents each, of which positions start anew."""
    batch: int = 4
    steps: int = 2
    clip: float | None = 0.5

    @property
    def length(self) -> int | None:
        return self.tokens

    def complete(self, batch: dict[str, Tensor], generator: torch.Generator) -> None:
        super().complete(batch, generator)
        if self.documents:
            starts = torch.rand(batch["input_ids"].shape, generator=generator) < 0.2
            starts[:, 0] = True
            places = torch.arange(self.tokens).expand(starts.shape)
            batch["position_ids"] = places - torch.where(starts, places, 0).cummax(1).values
