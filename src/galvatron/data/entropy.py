"""How much of a loss is explained by knowing how frequent each word is."""

from __future__ import annotations

import numpy as np
import torch

from galvatron.data.dataset import Dataset
from galvatron.data.order import generator_of, shuffled
from galvatron.models.layer import IGNORED

__all__ = ["unigram_entropy"]


def unigram_entropy(dataset: Dataset, *, most: int = 2048) -> float:
    """Entropy of the targets' frequencies in nats, over up to ``most`` samples from all over the data set.

    The loss of a model that has learned the frequencies and nothing else: below it, a model has learned more.
    """
    size = min(most, len(dataset))
    counts = torch.zeros(0, dtype=torch.long)
    for index in shuffled(np.arange(size), len(dataset), 0).tolist():
        labels = dataset.sample(index, generator_of(0, index), frozenset({"pixel_values"}))["labels"].flatten()
        found = torch.bincount(labels[labels != IGNORED], minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    shares = counts[counts > 0].double() / counts.sum()
    return float(-(shares * shares.log()).sum())
