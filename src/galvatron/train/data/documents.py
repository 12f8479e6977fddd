"""Where text comes from: files, rows of tables, or a generator.

Text is handed on in pieces, so that a file of any size is read in bounded memory. Every error names file and line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from galvatron.core.errors import InvalidInput
from galvatron.train.data.rows import Files, Row, Rows, files_in, rows_in
from galvatron.train.data.stories import stories
from galvatron.train.data.vocabulary import Ids, Tokenizer

__all__ = ["Piece", "StorySource", "TextSource", "encoded", "text_source"]

_LINE = "\n"
_CHARACTERS = 64 * 2**10
"""A piece of a text file: small enough to tokenize many at once, cut where a line ends."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of one."""

    text: str
    ends_document: bool
    continues: bool = False
    """Whether it goes on where a line of the piece before it ended."""


class TextSource(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """For errors."""

    @property
    def key(self) -> str:
        """Changes when the text does; found without reading it."""

    def pieces(self) -> Iterator[Piece]: ...


@dataclass(frozen=True)
class _TextFiles:
    """Each file is one document."""

    files: Files

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def key(self) -> str:
        return self.files.key

    def pieces(self) -> Iterator[Piece]:
        for path in self.files.files:
            try:
                yield from _pieces(path)
            except OSError as error:
                raise InvalidInput(f"{path}: cannot be read ({error}); check the file and its permissions") from None
            except UnicodeDecodeError as error:
                raise InvalidInput(
                    f"{path}: is not UTF-8 text (byte {error.object[error.start]:#04x}); convert it"
                ) from None


@dataclass(frozen=True)
class _TextRows:
    """A field of each row is a document."""

    rows: Rows
    text_field: str

    @property
    def name(self) -> str:
        return self.rows.name

    @property
    def key(self) -> str:
        return self.rows.key + ("" if self.text_field == "text" else f" {self.text_field}")

    def pieces(self) -> Iterator[Piece]:
        return (Piece(_text_of(row, self.text_field), True) for row in self.rows)


@dataclass(frozen=True)
class StorySource:
    """Generated text (:func:`galvatron.train.data.stories.stories`)."""

    count: int
    seed: int

    @property
    def name(self) -> str:
        return "stories"

    @property
    def key(self) -> str:
        sample = "\n".join(stories(16, self.seed))  # what they look like is part of the key
        return f"stories {self.count} {self.seed} {hashlib.sha256(sample.encode()).hexdigest()}"

    def pieces(self) -> Iterator[Piece]:
        return (Piece(story, True) for story in stories(self.count, self.seed))


def text_source(path: Path, text_field: str = "text") -> TextSource:
    """The text of a file or folder; ``text_field``: where it is in rows."""
    rows = rows_in(path)
    return _TextFiles(files_in(path)) if rows is None else _TextRows(rows, text_field)


def encoded(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Iterator[Ids]:
    """The tokens of each piece. Some tokenizers put a space before each text: what goes on is read with the end of the
    line before it."""
    texts = [_LINE + piece.text if piece.continues else piece.text for piece in pieces]
    line, *found = tokenizer.encode([_LINE, *texts])
    for piece, ids in zip(pieces, found, strict=True):
        if not piece.continues:
            yield ids
        elif np.array_equal(ids[: len(line)], line):
            yield ids[len(line) :]
        else:  # the line's end and what follows are one token
            yield tokenizer.encode([piece.text])[0]


def _pieces(path: Path) -> Iterator[Piece]:
    lines: list[str] = []
    characters, continues = 0, False
    with path.open(encoding="utf-8", newline="") as file:
        for line in file:
            if characters + len(line) > _CHARACTERS and lines:
                yield Piece("".join(lines), False, continues)
                lines, characters, continues = [], 0, True
            lines.append(line)
            characters += len(line)
    yield Piece("".join(lines), True, continues)


def _text_of(row: Row, name: str) -> str:
    text = row.fields.get(name)
    if not isinstance(text, str):
        has = f"it has {', '.join(map(repr, row.fields)) or 'nothing'}; name another with --text-field"
        shown = f"is {text!r}" if name in row.fields else f"is missing ({has})"
        raise InvalidInput(f"{row.where}: the field {name!r} {shown}; expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{row.where}: half of a character ({error.object[error.start]!r}) in the text; mend it"
        ) from None
    return text
