"""Blocks that cannot run on shapes alone, because they look at values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from galvatron.families.build import without_weights
from galvatron.families.registry import layered_model


class _Looking(nn.Module):
    """A block that looks at values, so that shapes alone do not run it, and has a table of its choices."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(16, 32)
        self.table = nn.Buffer(torch.tensor([0, 1]))

    def forward(self, hidden: Tensor) -> Tensor:
        both: Tensor = self.experts(hidden).unflatten(-1, (2, 16))
        chosen = self.table[int(bool(hidden.sum() > 0))]
        return hidden + both.gather(-2, chosen.expand(*both.shape[:-2], 1, 16)).squeeze(-2)


class _Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.blocks = nn.ModuleList([_Looking() for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.out(hidden)
        return logits


def test_tables_of_blocks_that_look_at_values() -> None:
    """Uninitialised memory is the largest number here, which is no expert's."""
    ids = torch.arange(24).view(2, 12)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        layers = layered_model(without_weights(_Looked()), {"tokens": ids, "labels": ids}).layers
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(layers) == 5
