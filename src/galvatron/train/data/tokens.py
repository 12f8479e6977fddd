"""A text's tokens in a mapped file, made once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from galvatron.core.errors import InvalidInput
from galvatron.train.data.documents import Piece, TextSource, encoded
from galvatron.train.data.vocabulary import SavedTokenizer, Tokenizer, train_tokenizer

__all__ = ["PackedTokens", "built_once", "default_cache", "pack", "trained_on"]


def default_cache() -> Path:
    """Where results are kept unless the user says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "galvatron"


def built_once(cache: Path, key: str, build: Callable[[Path], None]) -> Path:
    """The folder of this key; if it is not there, ``build`` fills it. Any number of processes may ask at once."""
    folder = cache / key
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f"{key}.lock").open("w")
    except OSError as error:
        raise InvalidInput(f"cache {cache}: cannot be written ({error}); give another cache folder") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():  # nobody made it while this process waited
            draft = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=cache))
            try:
                build(draft)
                draft.rename(folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return folder


_FORMAT = "2"
"""Part of every key: change it when what is written changes."""
_CHARACTERS_AT_ONCE = 4 * 2**20
_CHARACTERS_TO_LEARN_FROM = 64 * 2**20
_WIDE = 2**16
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedTokens:
    """All tokens of a text."""

    digest: str
    """Of the tokens: equal for equal ones, wherever they came from."""
    tokens: npt.NDArray[Any] = field(repr=False)


def pack(source: TextSource, tokenizer: Tokenizer, cache: Path) -> PackedTokens:
    """The tokens of all documents, one behind the other, each followed by the tokenizer's end token."""
    key = _key("tokens", source.key, tokenizer.digest)

    def build(folder: Path) -> None:
        _log.info("tokenizing %s into %s", source.name, cache)
        _write(source, tokenizer, folder)

    return _read(built_once(cache, key, build))


def trained_on(source: TextSource, cache: Path, *, words: int, sentinels: int) -> SavedTokenizer:
    """A tokenizer of up to so many words, trained on the beginning of the text."""
    key = _key("tokenizer", source.key, str(words), str(sentinels))

    def build(folder: Path) -> None:
        _log.info("training a tokenizer of %d words on %s into %s", words, source.name, cache)
        train_tokenizer(_beginning(source), folder, words=words, sentinels=sentinels)

    return SavedTokenizer(built_once(cache, key, build))


def _key(kind: str, *facts: str) -> str:
    return f"{kind}-{hashlib.sha256(json.dumps([_FORMAT, *facts]).encode()).hexdigest()[:24]}"


def _beginning(source: TextSource) -> Iterator[str]:
    left = _CHARACTERS_TO_LEARN_FROM
    for piece in source.pieces():
        yield piece.text
        left -= len(piece.text)
        if left <= 0:
            return


def _write(source: TextSource, tokenizer: Tokenizer, folder: Path) -> None:
    end = tokenizer.vocabulary.end
    dtype = np.dtype("<u2" if tokenizer.vocabulary.size <= _WIDE else "<u4")
    digest, total = hashlib.sha256(dtype.str.encode()), 0
    with (folder / "tokens.bin").open("wb") as file:
        for pieces in _batches(source.pieces()):
            for piece, ids in zip(pieces, encoded(pieces, tokenizer), strict=True):
                closed = np.append(ids, end) if piece.ends_document and end is not None else ids
                written = closed.astype(dtype).tobytes()
                digest.update(written)
                file.write(written)
                total += len(closed)
    if not total:
        raise InvalidInput(f"{source.name}: holds no text; give files with text in them")
    facts = {"tokens": total, "dtype": dtype.str, "digest": digest.hexdigest()[:24]}
    (folder / "tokens.json").write_text(json.dumps(facts), encoding="utf-8")


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces together: tokenizers work on several at once."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _read(folder: Path) -> PackedTokens:
    path = folder / "tokens.bin"
    try:
        facts = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        dtype, count, digest = np.dtype(facts["dtype"]), int(facts["tokens"]), str(facts["digest"])
        whole = path.stat().st_size == count * dtype.itemsize
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{folder}: is not a folder of tokens ({error!r}); delete it, and it is made anew") from None
    if not whole:
        raise InvalidInput(
            f"{path}: has {path.stat().st_size} bytes; expected {count * dtype.itemsize}; delete {folder}, and it is "
            "made anew"
        )
    return PackedTokens(digest, np.memmap(path, dtype, "r"))
