"""Documents that are kept apart: several in a row, each with positions of its own, or one in a row.

Positions that start anew tell attention where a document begins: it sees nothing before. The first token of a document
is no target, for what stands before it belongs to another. What is left of a row is filled with a document of padding,
which counts nowhere. So a row trains exactly as its documents would alone.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from galvatron.core.errors import InvalidInput
from galvatron.families.layer import IGNORED
from galvatron.train.data.dataset import Sample

__all__ = ["Document", "Examples", "read_documents", "rows_of", "write_documents"]

_FILE = "documents.npz"


@dataclass(frozen=True)
class Document:
    """Tokens, and which of them count as targets."""

    ids: npt.NDArray[np.int64]
    counted: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Examples:
    """A data set of rows of documents."""

    ids: npt.NDArray[Any] = field(repr=False)
    """Of all documents, one behind the other."""
    counted: npt.NDArray[np.bool_] = field(repr=False)
    starts: npt.NDArray[np.int64] = field(repr=False)
    """Where each begins, and where the last ends."""
    rows: Sequence[Sequence[int]] = field(repr=False)
    """Of each row, its documents."""
    length: int
    padding: int
    """A token; nobody looks at it."""

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.length} {self.rows}".encode())
        for part in (self.ids, self.counted, self.starts):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    @property
    def targets(self) -> int:
        """How many tokens count, in all."""
        return int(self.counted.sum())

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, generator: torch.Generator, unread: frozenset[str] = frozenset()) -> Sample:
        ids = torch.full((self.length,), self.padding)
        labels = torch.full((self.length,), IGNORED)
        positions = torch.zeros(self.length, dtype=torch.int64)
        place = 0
        for document in self.rows[index]:
            begin, end = self.starts[document : document + 2].tolist()
            tokens = torch.from_numpy(self.ids[begin:end].astype(np.int64))
            counts = torch.from_numpy(self.counted[begin:end].copy())
            counts[0] = False
            part = slice(place, place + len(tokens))
            ids[part], labels[part] = tokens, torch.where(counts, tokens, IGNORED)
            positions[part] = torch.arange(len(tokens))
            place += len(tokens)
        positions[place:] = torch.arange(self.length - place)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


def rows_of(lengths: Sequence[int], length: int, *, packed: bool) -> list[list[int]]:
    """Which documents stand in which row: one in each, or as many as fit (the longest first, each into the fullest row
    that has room for it)."""
    if not packed:
        return [[document] for document in range(len(lengths))]
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for document in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        place = bisect_left(room, (lengths[document], -1))
        left, row = room.pop(place) if place < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        insort(room, (left - lengths[document], row))
    return sorted(sorted(row) for row in rows)


def write_documents(documents: Iterable[Document], folder: Path, where: str) -> None:
    """Keep documents in a folder."""
    ids: list[npt.NDArray[np.int64]] = []
    counted: list[npt.NDArray[np.bool_]] = []
    for document in documents:
        if len(document.ids) > 1 and document.counted[1:].any():
            ids.append(document.ids)
            counted.append(document.counted)
    if not ids:
        raise InvalidInput(f"{where}: no document has a token to learn; give more data")
    starts = np.cumsum([0, *map(len, ids)])
    np.savez(folder / _FILE, ids=np.concatenate(ids), counted=np.concatenate(counted), starts=starts)


def read_documents(folder: Path, length: int, padding: int, *, packed: bool, where: str) -> Examples:
    """The documents in a folder as rows of so many tokens; longer ones are refused."""
    content: Mapping[str, Any] = np.load(folder / _FILE, allow_pickle=False)
    starts = content["starts"]
    lengths = np.diff(starts)
    if lengths.max() > length:
        longer = int((lengths > length).sum())
        raise InvalidInput(
            f"{where}: {longer} of {len(lengths)} documents have more than {length} tokens, the longest "
            f"{lengths.max()}; their end, perhaps the answer, would be lost: give a longer sequence length, or shorten "
            "them"
        )
    rows = rows_of(lengths.tolist(), length, packed=packed)
    return Examples(content["ids"], content["counted"], starts, rows, length, padding)
