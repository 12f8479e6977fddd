"""What a language model learns from a stretch of tokens: causal, masked, span corruption."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, Self

import torch
from torch import Tensor

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import IGNORED
from galvatron.train.data.requirements import Objective, TokenRequirements
from galvatron.train.data.vocabulary import Vocabulary

__all__ = ["Causal", "Masked", "SampleMaker", "SpanLengths", "Spans", "random_spans", "sample_maker_of"]

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


_HIDDEN = 0.15
"""Share of tokens to predict (BERT, Devlin et al. 2019, Section 3.1; T5, Raffel et al. 2020, Section 3.1.4)."""
_SHOWN_AS_MASK, _SHOWN_AS_RANDOM = 0.8, 0.1
"""Of BERT's hidden tokens; the rest is shown as it is."""


class SampleMaker(Protocol):
    """How samples are made from tokens."""

    @property
    def tokens(self) -> int:
        """Tokens of the text that one sample takes."""

    def sample(self, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """The sample made of that many tokens."""


@dataclass(frozen=True)
class Causal:
    """Each token is the target of the one before it; the model itself shifts the labels."""

    tokens: int

    def sample(self, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {"input_ids": tokens, "labels": tokens.clone()}


@dataclass(frozen=True)
class Masked:
    """BERT's: 15% of the tokens are predicted, always as many, never a special one."""

    length: int
    vocabulary: Vocabulary
    mask: int
    """The token that hides another."""

    @property
    def _ends(self) -> tuple[int, ...]:
        """What stands before and behind the text, [CLS] and [SEP], where the vocabulary has them."""
        start, end = self.vocabulary.start, self.vocabulary.end
        return () if start is None or end is None else (start, end)

    @property
    def tokens(self) -> int:
        return self.length - len(self._ends)

    def sample(self, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        ends = torch.tensor(self._ends, dtype=tokens.dtype)
        tokens = torch.cat([ends[:1], tokens, ends[1:]])
        special = torch.tensor(self.vocabulary.special, dtype=tokens.dtype)
        ordinary = torch.isin(tokens, special, invert=True).nonzero().flatten()
        count = min(max(1, round(_HIDDEN * len(ordinary))), len(ordinary))
        chosen = ordinary[torch.randperm(len(ordinary), generator=generator)[:count]]
        labels = torch.full_like(tokens, IGNORED)
        labels[chosen] = tokens[chosen]
        drawn = torch.rand(count, generator=generator)
        others = torch.randint(self.vocabulary.size, (count,), generator=generator)
        shown = torch.where(drawn < _SHOWN_AS_MASK + _SHOWN_AS_RANDOM, others, tokens[chosen])
        shown = torch.where(drawn < _SHOWN_AS_MASK, self.mask, shown)
        return {"input_ids": tokens.index_copy(0, chosen, shown), "labels": labels}


@dataclass(frozen=True)
class Spans:
    """T5's: runs of tokens are replaced by one sentinel each; the target is each sentinel and what it stands for."""

    lengths: SpanLengths
    sentinels: tuple[int, ...]
    end: int

    @property
    def tokens(self) -> int:
        return self.lengths.tokens

    def sample(self, tokens: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        pieces = list(torch.split(tokens, random_spans(self.lengths, generator)))
        marks = list(torch.tensor(self.sentinels[: self.lengths.spans])[:, None])
        end = torch.tensor([self.end])
        kept, hidden = pieces[0::2], pieces[1::2]
        source = torch.cat([piece for pair in zip(kept, marks, strict=True) for piece in pair] + [end])
        target = torch.cat([piece for pair in zip(marks, hidden, strict=True) for piece in pair] + [end])
        labels = torch.full((self.lengths.target,), IGNORED)
        labels[: len(target)] = target
        return {"input_ids": source, "labels": labels}


def sample_maker_of(needs: TokenRequirements, vocabulary: Vocabulary) -> SampleMaker:
    """How a model's samples are made of tokens of this vocabulary."""
    if needs.objective is Objective.CAUSAL:
        return Causal(needs.length)
    if needs.objective is Objective.MASKED:
        if vocabulary.mask is None:
            raise InvalidInput(
                "tokenizer: it has no mask token, which a masked language model needs; take the tokenizer of a masked "
                "model, 'bytes' or 'train'"
            )
        maker = Masked(needs.length, vocabulary, vocabulary.mask)
        if maker.tokens < 1:
            raise InvalidInput(f"sequence length {needs.length}: no room for words; a masked sample takes at least 3")
        return maker
    lengths = SpanLengths.of(needs.length)
    if len(vocabulary.sentinels) < lengths.spans:
        raise InvalidInput(
            f"tokenizer: it has {len(vocabulary.sentinels)} sentinels (<extra_id_0> …); samples of {needs.length} "
            f"tokens need {lengths.spans}: take T5's tokenizer, 'bytes' or 'train', or a shorter sequence length"
        )
    end = needs.end if vocabulary.end is None else vocabulary.end
    return Spans(lengths, vocabulary.sentinels, end)
