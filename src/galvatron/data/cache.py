"""Results on disk that one process makes while all others that want them wait.

A result is a folder. It is written under another name and renamed when it is complete, so a folder that is there is
whole, whatever happened to whoever wrote it. The lock goes with its process, so a killed one blocks nobody.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from galvatron.errors import InvalidInput

__all__ = ["built_once", "default_cache"]


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
