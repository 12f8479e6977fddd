"""A checkpoint's manifest: what was saved, and in which bytes of which file each part of each tensor is.

DCP would keep this in a pickle. It is JSON here, because nothing read from outside is unpickled, and it carries its own
SHA-256 and one for each chunk of data: a reader checks exactly the bytes it uses, as it reads them.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from galvatron.core.errors import CheckpointCorrupt, InvalidInput

__all__ = ["FORMAT_VERSION", "MANIFEST", "Chunk", "Manifest", "SavedOptimizer", "SavedTensor", "read_chunk"]

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_DATA_FILE = re.compile(r"rank-\d+\.bin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A block of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    """Of its first byte in the file."""
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A whole tensor in chunks that cover it."""

    dtype: str
    """By its name in torch."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedOptimizer:
    """An optimizer without its tensors."""

    kind: str
    groups: tuple[dict[str, Any], ...] = field(hash=False)
    """Hyper-parameters of each group."""
    group_of: dict[str, int] = field(hash=False)
    """Of each parameter, by its stock name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds."""

    version: int
    step: int
    world: int
    """Ranks that saved it."""
    plan: dict[str, Any] = field(hash=False)
    """The plan it was saved under, as a plan file has it; the model's configuration is in there."""
    seed: int
    iteration: int
    """With the seed, all that random numbers depend on."""
    progress: dict[str, Any] = field(hash=False)
    optimizer: SavedOptimizer
    files: dict[str, int] = field(hash=False)
    """Bytes of each file."""
    tensors: dict[str, SavedTensor] = field(hash=False)
    """``model/NAME``, ``optimizer/NAME/ENTRY`` and ``buffer/NAME``, names as in the stock model."""

    @property
    def parameters(self) -> dict[str, SavedTensor]:
        """The model's parameters by their stock names."""
        return {key.removeprefix("model/"): own for key, own in self.tensors.items() if key.startswith("model/")}

    @property
    def buffers(self) -> dict[str, SavedTensor]:
        """The model's persistent buffers by their stock names."""
        return {key.removeprefix("buffer/"): own for key, own in self.tensors.items() if key.startswith("buffer/")}

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    def text(self) -> str:
        """The file's content."""
        content = asdict(self)
        return json.dumps({"sha256": _digest(content), "content": content}, ensure_ascii=False, allow_nan=False)

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
        strange = [name for name in manifest.files if not _DATA_FILE.fullmatch(name)]
        strange += [
            chunk.file for own in manifest.tensors.values() for chunk in own.chunks if chunk.file not in manifest.files
        ]
        if strange:
            raise CheckpointCorrupt(f"{path}: names {strange[0]!r}, which is no data file of a checkpoint")
        return manifest


def _digest(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def read_chunk(folder: Path, chunk: Chunk) -> bytearray:
    """A chunk's bytes, checked."""
    path = folder / chunk.file
    content = bytearray(chunk.bytes)
    try:
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
