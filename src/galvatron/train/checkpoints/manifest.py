"""A checkpoint's manifest: what was saved, and in which bytes of which file each part of each tensor is.

DCP would keep this in a pickle. It is JSON here, because nothing read from outside is unpickled, and it carries its own
SHA-256 and one for each chunk of data: a reader checks exactly the bytes it uses, as it reads them.
"""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from galvatron.core.errors import CheckpointCorrupt, InvalidInput
from galvatron.train.checkpoints.consistency import problem_of
from galvatron.train.checkpoints.record import Chunk, ManifestRecord, SavedOptimizer, SavedTensor

__all__ = ["FORMAT_VERSION", "MANIFEST", "Chunk", "Manifest", "SavedOptimizer", "SavedTensor", "read_chunk", "sealed"]

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest(ManifestRecord):
    """The manifest of a checkpoint: its file."""

    def text(self) -> str:
        """The file's content."""
        return sealed(asdict(self))

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a checkpoint's folder."""
        path = folder / MANIFEST
        try:
            text = path.read_bytes().decode("utf-8")
        except FileNotFoundError:
            raise CheckpointCorrupt(f"{path}: is missing, so the checkpoint is incomplete") from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointCorrupt(f"{path}: cannot be read ({error})") from None
        return Manifest.parse(text, path)

    @staticmethod
    def parse(text: str, path: Path) -> Manifest:
        """The manifest from its text; ``path`` is for messages."""
        from pydantic import TypeAdapter, ValidationError

        try:
            raw = json.loads(text)
            content, digest = raw["content"], raw["sha256"]
            if digest != _digest(content):
                raise CheckpointCorrupt(f"{path}: does not have the SHA-256 it was written with")
            if content["version"] != FORMAT_VERSION:
                raise InvalidInput(
                    f"{path}: version {content['version']!r} of the format; this program reads {FORMAT_VERSION}; use "
                    "the version of galvatron that wrote it"
                )
            manifest = TypeAdapter(Manifest).validate_json(json.dumps(content), strict=True)
        except (ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
            raise CheckpointCorrupt(f"{path}: is no manifest of a checkpoint ({type(error).__name__})") from None
        if problem := problem_of(manifest):
            raise CheckpointCorrupt(f"{path}: {problem}; it is not as galvatron wrote it")
        return manifest


def sealed(content: Any) -> str:
    """A manifest's file of this content, with its checksum."""
    return json.dumps({"sha256": _digest(content), "content": content}, ensure_ascii=False, allow_nan=False)


def _digest(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def read_chunk(folder: Path, chunk: Chunk) -> bytearray:
    """A chunk's bytes, checked."""
    path = folder / chunk.file
    content = bytearray()
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe may never end
            raise CheckpointCorrupt(f"{path}: is not a file")
        content = bytearray(chunk.bytes)
        with path.open("rb", buffering=0) as file:
            file.seek(chunk.at)
            view, done = memoryview(content), 0
            while done < chunk.bytes and (count := file.readinto(view[done:])):
                done += count
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path}: is missing") from None
    except OSError as error:
        raise CheckpointCorrupt(f"{path}: cannot be read ({error.strerror or error})") from None
    if done < chunk.bytes:
        raise CheckpointCorrupt(f"{path}: ends at byte {chunk.at + done}; expected {chunk.at + chunk.bytes} and more")
    if hashlib.sha256(content).hexdigest() != chunk.sha256:
        raise CheckpointCorrupt(
            f"{path}: bytes {chunk.at} to {chunk.at + chunk.bytes} do not have the SHA-256 they were written with"
        )
    return content
