"""The arithmetic of T5's span corruption: lengths that fit, and where spans lie.

Follows ``random_spans_helper`` and ``random_spans_noise_mask`` of T5's own code (Raffel et al. 2020, Section 3.1.4 and
Appendix B): 15% of the tokens are hidden, in spans of 3 on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch

from galvatron.errors import InvalidInput

__all__ = ["SpanLengths", "random_spans"]

_DENSITY = 0.15
_MEAN_SPAN = 3.0
_ALIGNED = 48
"""Degrees of sequence parallelism worth thinking of divide this: 16, and 3 times 16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanLengths:
    """How many tokens of text make a sample, and into what."""

    tokens: int
    """Of text."""
    hidden: int
    """Of these, in spans."""
    spans: int
    target: int
    """Of the labels: spans with their sentinels and an end token, and a few labels that do not count."""

    @classmethod
    def of(cls, length: int) -> Self:
        """For inputs of exactly ``length`` tokens (sentinels and end token included).

        The target's length is rounded up so that sequence parallelism can divide it where it can divide the input's.
        """
        tokens = 2
        if _source(tokens) > length:
            raise InvalidInput(f"sequence length {length}: span corruption needs at least {_source(tokens)} tokens")
        # One token more makes the input longer by one or leaves it as it is, so no length is skipped.
        while _source(tokens + 1) <= length:
            tokens += 1
        hidden, spans = _noise(tokens)
        unit = math.gcd(length, _ALIGNED)
        return cls(tokens=tokens, hidden=hidden, spans=spans, target=-(-(hidden + spans + 1) // unit) * unit)


def _noise(tokens: int) -> tuple[int, int]:
    """Hidden tokens and spans in that many tokens."""
    hidden = min(max(round(tokens * _DENSITY), 1), tokens - 1)
    return hidden, max(round(hidden / _MEAN_SPAN), 1)


def _source(tokens: int) -> int:
    """Length of the input that so many tokens become."""
    hidden, spans = _noise(tokens)
    return tokens - hidden + spans + 1


def random_spans(lengths: SpanLengths, generator: torch.Generator) -> list[int]:
    """Lengths of the pieces of a text: kept, hidden, kept, hidden …; all divisions are equally likely."""
    kept = _divided(lengths.tokens - lengths.hidden, lengths.spans, generator)
    hidden = _divided(lengths.hidden, lengths.spans, generator)
    return [length for pair in zip(kept, hidden, strict=True) for length in pair]


def _divided(items: int, parts: int, generator: torch.Generator) -> list[int]:
    """A number as a sum of positive parts."""
    cuts = torch.randperm(items - 1, generator=generator)[: parts - 1].sort().values + 1
    edges = [0, *cuts.tolist(), items]
    return [after - before for before, after in pairwise(edges)]
