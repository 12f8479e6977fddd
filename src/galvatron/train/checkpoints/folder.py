"""A folder of checkpoints: which are complete, and how one comes and goes so that a crash never leaves a half one.

| name | |
|---|---|
| ``step-00000010`` | complete |
| ``step-00000010.2`` | complete, saved again by a run that had gone back; takes the place of the one before |
| ``step-00000010.partial`` | being written, or left by a run that died; the next save deletes it |
| ``step-00000010.deleted`` | on its way out; the next save goes on deleting it |
| ``step-00000010.abandoned`` | complete, but a run went back to before it; never loaded, deleted when passed again |

Everything happens by renaming whole folders, and a name is only given to what is safely on disk. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from galvatron.core.errors import InvalidInput
from galvatron.train.checkpoints.manifest import MANIFEST

__all__ = ["Saved", "begin", "commit", "complete", "discard", "find", "synced", "tidy"]

_logger = logging.getLogger(__name__)
_COMPLETE = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_ABANDONED = re.compile(r"step-(\d{8,})(?:\.\d+)*\.abandoned")
_LEFTOVER = re.compile(r"step-\d{8,}(?:\.\d+)*\.(?:partial|deleted)")


@dataclass(frozen=True, order=True, slots=True)
class Saved:
    """A complete checkpoint."""

    step: int
    attempt: int
    """Above 1 where the step was saved again."""
    path: Path


def _attempts(folder: Path) -> list[Saved]:
    """All complete ones in order, those that another attempt has taken the place of too."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = _COMPLETE.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append(Saved(int(match[1]), int(match[2] or 1), path))
    return sorted(found)


def complete(folder: Path) -> list[Saved]:
    """The complete checkpoints in a folder, one a step, in the order of steps. Looks at names alone."""
    return list({saved.step: saved for saved in _attempts(folder)}.values())


def find(path: Path) -> Saved:
    """The checkpoint that a path means: its own folder, or the newest in a folder of them or of a run."""
    match = _COMPLETE.fullmatch(path.resolve().name)
    if match and (path / MANIFEST).is_file():
        return Saved(int(match[1]), int(match[2] or 1), path)
    for folder in (path, path / "checkpoints"):
        if found := complete(folder):
            return found[-1]
    raise InvalidInput(
        f"{path}: no complete checkpoint there; expected a folder such as step-00000010, or one that holds such folders"
    )


def begin(folder: Path, step: int) -> Path:
    """A fresh folder to write a step into, after deleting what dead runs left."""
    folder.mkdir(parents=True, exist_ok=True)
    _sync_folder(folder.parent)
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)
    partial = folder / f"step-{step:08}.partial"
    partial.mkdir()
    return partial


def discard(partial: Path) -> None:
    """Give back the room of a save that failed; what cannot be deleted now, the next save deletes."""
    shutil.rmtree(partial, ignore_errors=True)


def commit(partial: Path, manifest: str) -> Path:
    """Make what was written into a folder a complete checkpoint: the manifest comes last, then the name."""
    with synced(partial / MANIFEST) as file:
        file.write(manifest.encode("utf-8"))
    _sync_folder(partial)
    folder, name = partial.parent, partial.name.removesuffix(".partial")
    earlier = [saved.attempt for saved in _attempts(folder) if saved.path.name.split(".")[0] == name]
    final = folder / (f"{name}.{max(earlier) + 1}" if earlier else name)
    partial.rename(final)
    _sync_folder(folder)
    return final


def tidy(folder: Path, newest: Path, keep: int) -> None:
    """After a save: set aside later steps, which a run went back from, and delete those that were set aside before and
    are no longer later, and all but the last ``keep`` steps."""
    attempts = _attempts(folder)
    step = next(saved.step for saved in attempts if saved.path == newest)
    for saved in attempts:
        if saved.step > step:
            aside = _free(saved.path, "abandoned")
            saved.path.rename(aside)
            _logger.warning("%s is later than step %d, just saved: kept as %s", saved.path, step, aside.name)
    for path in list(folder.iterdir()):
        match = _ABANDONED.fullmatch(path.name)
        if match and int(match[1]) <= step:
            shutil.rmtree(path)
    kept = {saved.path for saved in complete(folder)[-keep:]}
    for saved in _attempts(folder):
        if saved.path not in kept:
            gone = _free(saved.path, "deleted")
            saved.path.rename(gone)  # first the name: a half deleted folder must not look complete
            shutil.rmtree(gone)
    _sync_folder(folder)


def _free(path: Path, ending: str) -> Path:
    """A name for it that nothing has yet."""
    target, number = path.with_name(f"{path.name}.{ending}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{number}.{ending}")
    return target


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on disk when the block ends; errors name it."""
    try:
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync_folder(folder: Path) -> None:
    """Names in a folder are safe only when the folder itself is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
