"""What a manifest holds: one dataclass for each of its objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Chunk", "ManifestRecord", "SavedOptimizer", "SavedTensor"]


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
class ManifestRecord:
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
