"""From a run of tokens to a sample: what the model sees, and what it is to predict.

No sample has padding in its input, so none needs an attention mask, without which attention kernels are fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from galvatron.data.spans import SpanLengths, random_spans
from galvatron.data.vocabulary import Vocabulary
from galvatron.data.wanted import Objective, TokensWanted
from galvatron.errors import InvalidInput
from galvatron.models.layer import IGNORED

__all__ = ["Causal", "Making", "Masked", "Spans", "making_of"]

_HIDDEN = 0.15
"""Share of tokens to predict (BERT, Devlin et al. 2019, Section 3.1; T5, Raffel et al. 2020, Section 3.1.4)."""
_SHOWN_AS_MASK, _SHOWN_AS_RANDOM = 0.8, 0.1
"""Of BERT's hidden tokens; the rest is shown as it is."""


class Making(Protocol):
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


def making_of(wanted: TokensWanted, vocabulary: Vocabulary) -> Making:
    """How a model's samples are made of tokens of this vocabulary."""
    if wanted.objective is Objective.CAUSAL:
        return Causal(wanted.length)
    if wanted.objective is Objective.MASKED:
        if vocabulary.mask is None:
            raise InvalidInput(
                "tokenizer: it has no mask token, which a masked language model needs; take the tokenizer of a masked "
                "model, 'bytes' or 'train'"
            )
        making = Masked(wanted.length, vocabulary, vocabulary.mask)
        if making.tokens < 1:
            raise InvalidInput(f"sequence length {wanted.length}: no room for words; a masked sample takes at least 3")
        return making
    lengths = SpanLengths.of(wanted.length)
    if len(vocabulary.sentinels) < lengths.spans:
        raise InvalidInput(
            f"tokenizer: it has {len(vocabulary.sentinels)} sentinels (<extra_id_0> …); samples of {wanted.length} "
            f"tokens need {lengths.spans}: take T5's tokenizer, 'bytes' or 'train', or a shorter sequence length"
        )
    end = wanted.end if vocabulary.end is None else vocabulary.end
    return Spans(lengths, vocabulary.sentinels, end)
