"""Whether every byte of a checkpoint is as it was written. Imports no torch."""

from __future__ import annotations

from itertools import chain

from galvatron.checkpoints.folder import Saved
from galvatron.checkpoints.manifest import Manifest, read_chunk
from galvatron.errors import CheckpointCorrupt

__all__ = ["verify"]


def verify(saved: Saved) -> Manifest:
    """Read and check all of a checkpoint; raises :class:`galvatron.CheckpointCorrupt` naming the first bad file."""
    manifest = Manifest.read(saved.path)
    if manifest.step != saved.step:
        raise CheckpointCorrupt(f"{saved.path}: holds step {manifest.step}; was the folder renamed?")
    for name, size in manifest.files.items():
        path = saved.path / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise CheckpointCorrupt(f"{path}: " + ("is missing" if found is None else f"has {found} bytes, not {size}"))
    chunks = chain.from_iterable(own.chunks for own in manifest.tensors.values())
    for chunk in sorted(chunks, key=lambda own: (own.file, own.at)):
        read_chunk(saved.path, chunk)
    return manifest
