"""Data without files: random, but not so random that nothing can be learned from it.

Words follow Zipf's law, so that the loss can fall from the uniform log(vocabulary) to the entropy of the words. An
image shows the pattern of its class under noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.train.data.dataset import Dataset, Sample
from galvatron.train.data.language import LanguageData
from galvatron.train.data.objectives import SpanLengths, sample_maker_of
from galvatron.train.data.order import generator_of, mixed
from galvatron.train.data.requirements import ImageRequirements, Objective, TokenRequirements, requirements_of
from galvatron.train.data.vocabulary import Vocabulary

__all__ = ["ZipfTokens", "synthetic"]

_SAMPLES = 65_536
_PATTERN = 4
"""Fields of a class's pattern along each side."""
_NOISE = 0.5


@dataclass(frozen=True)
class ZipfTokens:
    """Words from ``first`` up to ``last`` (exclusive), the k-th about 1/k as frequent as the first."""

    first: int
    last: int

    @property
    def fingerprint(self) -> str:
        return f"zipf-{self.first}-{self.last}"

    def samples(self, tokens: int) -> int:
        return _SAMPLES

    def take(self, index: int, tokens: int, generator: torch.Generator) -> Tensor:
        words = self.last - self.first
        # Uniform in the logarithm: word k has probability log(1 + 1/k) / log(words + 1), for k from 1.
        drawn = (words + 1) ** torch.rand(tokens, generator=generator, dtype=torch.float64)
        return self.first + (drawn.long() - 1).clamp(0, words - 1)


@dataclass(frozen=True)
class PatternImages:
    """Images of random classes."""

    needs: ImageRequirements
    seed: int

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.needs} {self.seed}".encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return _SAMPLES

    def sample(self, index: int, generator: torch.Generator, unread: frozenset[str] = frozenset()) -> Sample:
        size = (self.needs.channels, self.needs.height, self.needs.width)
        label = mixed(self.seed, index) % self.needs.classes
        if "pixel_values" in unread:
            return {"pixel_values": torch.zeros(size), "labels": torch.tensor(label)}
        pattern = torch.randn(1, size[0], _PATTERN, _PATTERN, generator=generator_of(self.seed, label))
        pixels = functional.interpolate(pattern, size[1:])[0] + _NOISE * torch.randn(size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor(label)}


def synthetic(config: Mapping[str, Any], training: Training, *, seed: int = 0) -> Dataset:
    """Random data of the right kind for the model of this configuration; ``seed`` decides how classes look."""
    needs = requirements_of(config, training)
    if isinstance(needs, ImageRequirements):
        return PatternImages(needs, seed)
    vocabulary, stream = _words(needs)
    return LanguageData(stream, sample_maker_of(needs, vocabulary))


def _words(needs: TokenRequirements) -> tuple[Vocabulary, ZipfTokens]:
    """Special tokens at the end of the vocabulary, as in T5's own code, and the words before them."""
    size, first, special = needs.vocabulary, 0, 0
    if needs.objective is Objective.MASKED:
        special = 1
    elif needs.objective is Objective.SPANS:
        first, special = needs.end + 1, SpanLengths.of(needs.length).spans
    if size - special <= first:
        raise InvalidInput(
            f"synthetic data: a vocabulary of {size} leaves no words beside {special} special tokens at its end and "
            f"{first} at its beginning; give the model a larger one"
        )
    ends = tuple(range(size - 1, size - 1 - special, -1))
    masked = needs.objective is Objective.MASKED
    vocabulary = Vocabulary(
        size=size - special,
        mask=ends[0] if masked else None,
        sentinels=() if masked else ends,
        special=ends,
    )
    return vocabulary, ZipfTokens(first, size - special)
