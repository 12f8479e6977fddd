"""Tokenizers: from text to token ids, and which ids have a meaning of their own.

A tokenizer is a folder as Hugging Face saves it, plain bytes, or one trained on the text itself. Nothing is fetched
from a network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from galvatron.core.errors import InvalidInput

__all__ = [
    "TOKENIZER_FILES",
    "ByteTokenizer",
    "SavedTokenizer",
    "Tokenizer",
    "Vocabulary",
    "has_tokenizer",
    "train_tokenizer",
]

Ids = npt.NDArray[np.int64]

_SPECIAL = ("<pad>", "</s>", "<mask>", "<s>")
"""Of the tokenizers that are made here, as ids 0 to 3: T5's ids of padding and end."""
_BYTES = 256
_VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model")
"""Files of which a tokenizer has at least one."""
TOKENIZER_FILES = (
    *_VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What tokenizers are saved as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Token ids with a meaning; None where a tokenizer has no such token."""

    size: int
    """Ids are below it."""
    mask: int | None = None
    start: int | None = None
    """Begins a masked sample ([CLS])."""
    end: int | None = None
    """Ends a document ([SEP], </s>)."""
    sentinels: tuple[int, ...] = ()
    """Stand for hidden spans, in this order."""
    special: tuple[int, ...] = ()
    """All that are no text."""


class Tokenizer(Protocol):
    """Makes tokens of text."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def digest(self) -> str:
        """Equal for tokenizers that make the same tokens."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The tokens of each text, without special ones."""


class ByteTokenizer:
    """Every byte of the text is a token: no vocabulary to learn, and no text it cannot write."""

    def __init__(self, sentinels: int) -> None:
        first = len(_SPECIAL) + _BYTES
        marks = tuple(range(first, first + sentinels))
        self.vocabulary = Vocabulary(
            size=first + sentinels, mask=2, start=3, end=1, sentinels=marks, special=(0, 1, 2, 3, *marks)
        )
        self.digest = f"bytes-{len(_SPECIAL)}"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) + len(_SPECIAL) for text in texts]


class SavedTokenizer:
    """A tokenizer from a folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        if not folder.is_dir():
            raise InvalidInput(
                f"tokenizer {str(folder)!r}: no such folder, and nothing is fetched from a network; give a folder with "
                "tokenizer.json (download it first), 'bytes', or 'train' to train one on the data"
            )
        if not has_tokenizer(folder):
            raise InvalidInput(
                f"tokenizer {str(folder)!r}: the folder holds none of {', '.join(_VOCABULARIES)}; give a folder "
                "written by save_pretrained of a tokenizer, 'bytes' or 'train'"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # whatever a damaged file makes transformers and tokenizers raise
            raise InvalidInput(
                f"tokenizer {str(folder)!r}: cannot be loaded ({type(error).__name__}: {error}); save it again with "
                "transformers' save_pretrained"
            ) from None
        self.folder = folder
        self.tokenizer = self._tokenizer
        """transformers' own, which knows the chat template."""
        self.vocabulary = _described(self._tokenizer)
        digest = hashlib.sha256()
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                digest.update(f"{name}\0".encode() + (folder / name).read_bytes())
        self.digest = digest.hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # texts longer than the model's limit are cut into samples later
        )
        return [np.array(ids, np.int64) for ids in found["input_ids"]]


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer is saved there."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def _described(tokenizer: Any) -> Vocabulary:
    ids = tokenizer.get_vocab()
    marks = takewhile(lambda mark: mark in ids, (f"<extra_id_{number}>" for number in count()))
    masked = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
    return Vocabulary(
        size=max(len(tokenizer), max(ids.values()) + 1),
        mask=tokenizer.mask_token_id,
        start=tokenizer.cls_token_id,
        end=tokenizer.sep_token_id if masked else tokenizer.eos_token_id,
        sentinels=tuple(ids[mark] for mark in marks),
        special=tuple(sorted(set(tokenizer.all_special_ids))),
    )


def train_tokenizer(texts: Iterable[str], folder: Path, *, words: int, sentinels: int) -> None:
    """Byte-pair encoding with up to ``words`` tokens learned from these texts, saved in Hugging Face's format."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*_SPECIAL, *(f"<extra_id_{number}>" for number in range(sentinels))]
    if words < len(special) + _BYTES:
        raise InvalidInput(
            f"tokenizer 'train': a vocabulary of {words} is too small; expected at least {len(special) + _BYTES} "
            f"({_BYTES} bytes and {len(special)} special tokens), the vocab_size of the model's configuration"
        )
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    pad, end, mask, start = _SPECIAL
    wrapper: Any = PreTrainedTokenizerFast  # its constructor has no types
    wrapped = wrapper(
        tokenizer_object=model,
        pad_token=pad,
        eos_token=end,
        sep_token=end,
        cls_token=start,
        mask_token=mask,
        additional_special_tokens=special[len(_SPECIAL) :],
    )
    wrapped.save_pretrained(str(folder))
