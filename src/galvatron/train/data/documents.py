"""Where text comes from: files, folders of files, saved Hugging Face datasets, or a generator.

Text is handed on in pieces, so that a file of any size is read in bounded memory. Every error names file and line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from galvatron.core.errors import InvalidInput
from galvatron.train.data.stories import stories
from galvatron.train.data.tables import is_saved_dataset, rows_of_arrow, rows_of_parquet, rows_of_saved, text_of

__all__ = ["Piece", "StorySource", "TextSource", "text_source"]

_CHARACTERS = 64 * 2**10
"""A piece of a text file: small enough to tokenize many at once, cut where a line ends."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of one."""

    text: str
    ends_document: bool


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
class _Files:
    root: Path
    files: tuple[Path, ...]
    read: Callable[[Path, str], Iterator[Piece]]
    text_field: str

    @property
    def name(self) -> str:
        return str(self.files[0] if len(self.files) == 1 else self.root)

    @property
    def key(self) -> str:
        return _stamp(self.root, self.files) + _named(self.text_field)

    def pieces(self) -> Iterator[Piece]:
        for path in self.files:
            try:
                yield from self.read(path, self.text_field)
            except OSError as error:
                raise InvalidInput(f"{path}: cannot be read ({error}); check the file and its permissions") from None
            except UnicodeDecodeError as error:
                raise InvalidInput(
                    f"{path}: is not UTF-8 text (byte {error.object[error.start]:#04x}); convert it"
                ) from None


@dataclass(frozen=True)
class _SavedDataset:
    root: Path
    text_field: str

    @property
    def name(self) -> str:
        return str(self.root)

    @property
    def key(self) -> str:
        return _stamp(self.root, tuple(_visible(self.root))) + _named(self.text_field)

    def pieces(self) -> Iterator[Piece]:
        return (Piece(text, True) for text in rows_of_saved(self.root, self.text_field))


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
    """The text of a file or folder; ``text_field``: where it is in tables and lines of JSON."""
    if path.is_file():
        if path.suffix not in _READERS:
            raise InvalidInput(f"data {str(path)!r}: expected a file ending in {', '.join(_READERS)}, or a folder")
        return _Files(path.parent, (path,), _READERS[path.suffix], text_field)
    if is_saved_dataset(path):
        return _SavedDataset(path, text_field)
    files = [file for file in _visible(path) if file.suffix in _READERS]
    kinds = sorted({file.suffix for file in files})
    if not files:
        raise InvalidInput(
            f"data {str(path)!r}: the folder has no files ending in {', '.join(_READERS)} and was not written by "
            "save_to_disk of a Hugging Face dataset; give a folder with text (class folders of images are for image "
            "models)"
        )
    if len(kinds) > 1:
        raise InvalidInput(
            f"data {str(path)!r}: the folder has files ending in {' and '.join(kinds)}; give a file, or a folder with "
            "files of one kind"
        )
    return _Files(path, tuple(files), _READERS[kinds[0]], text_field)


def _visible(folder: Path) -> list[Path]:
    """All files below a folder in an order that is the same everywhere."""
    found = (file for file in folder.rglob("*") if file.is_file())
    inside = [(file.relative_to(folder).parts, file) for file in found]
    return [file for parts, file in sorted(inside) if not any(part.startswith(".") for part in parts)]


def _stamp(root: Path, files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256(str(root.resolve()).encode())
    for path in files:
        facts = path.stat()
        digest.update(f"\0{path.relative_to(root)}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    return digest.hexdigest()


def _named(text_field: str) -> str:
    """In a key: nothing for the usual one."""
    return "" if text_field == "text" else f" {text_field}"


def _text(path: Path, text_field: str) -> Iterator[Piece]:
    """A file of text is one document."""
    lines: list[str] = []
    characters = 0
    with path.open(encoding="utf-8", newline="") as file:
        for line in file:
            if characters + len(line) > _CHARACTERS and lines:
                yield Piece("".join(lines), False)
                lines, characters = [], 0
            lines.append(line)
            characters += len(line)
    yield Piece("".join(lines), True)


def _json_lines(path: Path, text_field: str) -> Iterator[Piece]:
    """Each line is an object with a field "text", or of another name, a document."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidInput(
                    f"{where}: is not JSON ({error}); expected an object with a field {text_field!r}"
                ) from None
            if not isinstance(row, dict):
                raise InvalidInput(f"{where}: is {line.strip()[:40]!r}; expected an object with a field {text_field!r}")
            yield Piece(text_of(row, where, text_field), True)


def _parquet(path: Path, text_field: str) -> Iterator[Piece]:
    return (Piece(text, True) for text in rows_of_parquet(path, text_field))


def _arrow(path: Path, text_field: str) -> Iterator[Piece]:
    return (Piece(text, True) for text in rows_of_arrow(path, text_field))


_READERS: dict[str, Callable[[Path, str], Iterator[Piece]]] = {
    ".txt": _text,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
