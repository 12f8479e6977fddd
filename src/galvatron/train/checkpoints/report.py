"""Every byte of a checkpoint checked, and what people see of it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from galvatron.core.errors import CheckpointCorrupt
from galvatron.core.units import format_bytes
from galvatron.train.checkpoints.folder import Saved, complete
from galvatron.train.checkpoints.manifest import Manifest, read_chunk

__all__ = ["Report", "checkpoints_view", "reports", "verify_all"]


def verify_all(saved: Saved) -> Manifest:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One folder's state."""

    name: str
    step: int | None
    """None: not a complete checkpoint."""
    bytes: int
    world: int | None
    """Ranks that saved it."""
    state: str
    """complete, verified, damaged; else the ending of its name: partial, deleted, abandoned."""
    damage: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reports(path: Path, *, verify: bool) -> list[Report]:
    """All of a folder's checkpoints by step, then what is no checkpoint (yet, or any more)."""
    folder = path if any(path.glob("step-*")) else path / "checkpoints"
    found = complete(folder)
    listed = []
    for saved in found:
        try:
            manifest = verify_all(saved) if verify else Manifest.read(saved.path)
        except CheckpointCorrupt as error:
            listed.append(_report(saved.path, saved.step, None, "damaged", str(error)))
        else:
            listed.append(_report(saved.path, saved.step, manifest.world, "verified" if verify else "complete", None))
    known = {saved.path for saved in found}
    for other in sorted(folder.glob("step-*")):
        if other not in known and other.is_dir():
            ending = other.suffix.removeprefix(".")
            state = ending if ending in ("partial", "deleted", "abandoned") else "incomplete"
            listed.append(_report(other, None, None, state, None))
    return listed


def _report(path: Path, step: int | None, world: int | None, state: str, damage: str | None) -> Report:
    size = sum(file.lstat().st_size for file in path.iterdir())
    return Report(name=path.name, step=step, bytes=size, world=world, state=state, damage=damage)


def checkpoints_view(found: Sequence[Report]) -> RenderableType:
    """Checkpoints as a table."""
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for column in ("folder", "step", "size", "saved by", "state"):
        table.add_column(column, justify="left" if column in ("folder", "state") else "right")
    for report in found:
        table.add_row(
            report.name,
            "–" if report.step is None else str(report.step),
            format_bytes(report.bytes),
            "–" if report.world is None else f"{report.world} ranks",
            report.state,
        )
    return table
