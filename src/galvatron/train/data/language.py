"""Data sets of tokens: a stream of them, cut into samples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from galvatron.train.data.dataset import Sample
from galvatron.train.data.objectives import SampleMaker
from galvatron.train.data.tokens import PackedTokens

__all__ = ["LanguageData", "PackedStream", "Stream"]


class Stream(Protocol):
    """Where tokens come from."""

    @property
    def fingerprint(self) -> str: ...

    def samples(self, tokens: int) -> int:
        """How many samples of that many tokens there are."""

    def take(self, index: int, tokens: int, generator: torch.Generator) -> Tensor:
        """The tokens of one sample."""


@dataclass(frozen=True)
class PackedStream:
    """Documents one behind the other, cut without regard to where they end; a rest too short for a sample is left."""

    packed: PackedTokens

    @property
    def fingerprint(self) -> str:
        return self.packed.digest

    def samples(self, tokens: int) -> int:
        return len(self.packed.tokens) // tokens

    def take(self, index: int, tokens: int, generator: torch.Generator) -> Tensor:
        part = self.packed.tokens[index * tokens : (index + 1) * tokens]
        return torch.from_numpy(part.astype(np.int64))


@dataclass(frozen=True)
class LanguageData:
    """Samples of a language model."""

    stream: Stream
    maker: SampleMaker

    @property
    def fingerprint(self) -> str:
        facts = f"{self.stream.fingerprint} {self.maker}"
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.stream.samples(self.maker.tokens)

    def sample(self, index: int, generator: torch.Generator, unread: frozenset[str] = frozenset()) -> Sample:
        tokens = self.stream.take(index, self.maker.tokens, generator)
        return self.maker.sample(tokens, generator)
