"""Text and conversations whose documents are kept apart, for causal language models that can do that."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Training
from galvatron.families.build import read_config, stock_class
from galvatron.families.context import steady_positions
from galvatron.families.tiny import TINY_TOKENS, tiny_config
from galvatron.runtime.trial import random_model
from galvatron.train.data.chat import Chat
from galvatron.train.data.documents import TextSource, encoded
from galvatron.train.data.examples import Document, Examples, read_documents, write_documents
from galvatron.train.data.requirements import Objective, TokenRequirements
from galvatron.train.data.tokens import built_once
from galvatron.train.data.vocabulary import SavedTokenizer, Tokenizer

__all__ = ["KeptApart"]

_FORMAT = "2"
"""Part of every key: change it when what is written changes."""
_TOLERANCE = 1e-4
_LENGTHS = (5, 8)


@dataclass(frozen=True, kw_only=True)
class KeptApart:
    """How documents become rows of a model's samples."""

    config: Mapping[str, Any]
    needs: TokenRequirements
    cache: Path
    packed: bool

    def of_chat(self, chat: Chat, tokenizer: SavedTokenizer) -> Examples:
        """Conversations, of which answers count."""
        return self._made(chat.name, chat.key, tokenizer, partial(chat.documents, tokenizer.tokenizer))

    def of_text(self, source: TextSource, tokenizer: Tokenizer) -> Examples:
        """Documents of text, all tokens of which count; longer ones than a row are several."""
        key = f"{source.key} {self.needs.length}"
        return self._made(source.name, key, tokenizer, lambda: self._pieces(source, tokenizer))

    def _made(self, name: str, key: str, tokenizer: Tokenizer, documents: Any) -> Examples:
        if self.needs.objective is not Objective.CAUSAL:
            raise InvalidInput(
                f"data {name!r}: conversations and packed documents are for causal language models; this one learns "
                f"by {self.needs.objective.value}: give plain text, without --pack"
            )
        if tokenizer.vocabulary.size > self.needs.vocabulary:
            raise InvalidInput(
                f"tokenizer: it has {tokenizer.vocabulary.size} tokens, the model's vocabulary "
                f"{self.needs.vocabulary}; take the model's own tokenizer, or a model with a larger vocab_size"
            )
        check_kept_apart(self.config, self.needs.length)
        digest = hashlib.sha256(f"{_FORMAT} {key} {tokenizer.digest}".encode()).hexdigest()[:24]
        folder = built_once(self.cache, f"documents-{digest}", lambda new: write_documents(documents(), new, name))
        end = tokenizer.vocabulary.end or 0
        return read_documents(folder, self.needs.length, end, packed=self.packed, where=f"data {name!r}")

    def _pieces(self, source: TextSource, tokenizer: Tokenizer) -> Iterator[Document]:
        end = tokenizer.vocabulary.end
        ids: list[int] = []
        for piece in source.pieces():
            ids += next(encoded([piece], tokenizer)).tolist()
            if not piece.ends_document:
                continue
            if end is not None:
                ids.append(end)
            for begin in range(0, len(ids), self.needs.length):
                part = np.array(ids[begin : begin + self.needs.length], np.int64)
                yield Document(part, np.ones(len(part), bool))
            ids = []


@torch.no_grad()
def check_kept_apart(config: Mapping[str, Any], length: int) -> None:
    """Raise :class:`InvalidInput` if the stock model mixes documents whose positions start anew in rows of so many
    tokens: a tiny copy of it must give each of two in one row the scores that it gives them alone."""
    full = read_config(config)
    kind = stock_class(full)
    refused = f"{kind.__name__}: documents in one row cannot be kept apart, because %s; give plain text, without --pack"
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        raise InvalidInput(refused % "it takes no position_ids")
    steady = steady_positions(full)
    if steady is not None and length > steady:
        raise InvalidInput(
            refused % f"above {steady} tokens it rotates all of a batch by the longest document in it (its rope_type)"
        )
    with torch.random.fork_rng(devices=[]):
        model: Any = random_model(kind, tiny_config(full), Training(dropout=False)).eval()
    words = min(TINY_TOKENS, model.get_input_embeddings().num_embeddings)
    parts = [torch.arange(1, count + 1)[None] * 7 % words for count in _LENGTHS]
    positions = [torch.arange(count)[None] for count in _LENGTHS]
    alone = [
        model(input_ids=ids, position_ids=own, use_cache=False).logits
        for ids, own in zip(parts, positions, strict=True)
    ]
    together = model(input_ids=torch.cat(parts, 1), position_ids=torch.cat(positions, 1), use_cache=False).logits
    if not torch.allclose(together, torch.cat(alone, 1), atol=_TOLERANCE, rtol=_TOLERANCE):
        raise InvalidInput(refused % "its second document is computed otherwise behind a first")
