"""What was measured before, kept in files, and where figures come from."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import galvatron
from galvatron.measure.figures import NOISY, Quality, quality_in

__all__ = ["cached_file", "keep", "key_of", "provenance", "warn_if_noisy"]

_LOG = logging.getLogger(__name__)


def provenance(what: str, quality: Quality) -> str:
    """One line: what was measured, when, with which versions, and how well it repeats."""
    versions = ", ".join(
        f"{name} {version}" for name in ("torch", "transformers") if (version := _version(name)) is not None
    )
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    day = time.strftime("%Y-%m-%d")
    by = f"measured {day} by galvatron {galvatron.__version__}"
    return f"{by} on {what}, {threads} thread(s) a process; {versions}; {quality}"


def warn_if_noisy(source: str) -> None:
    """Say that figures from the cache were measured on a busy machine; ``source``: their provenance."""
    quality = quality_in(source)
    if quality is not None and quality.spread > NOISY:
        _LOG.warning(
            "figures measured earlier are used again, from a time when the machine was busy with other things: %s; "
            "measure again with --fresh",
            quality,
        )


_VERSION = 24
"""Of the profiler: raised when the same machine would be described differently."""
_PACKAGES = ("torch", "transformers", "numpy")
_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GALVATRON_VIRTUAL",
    "NCCL_COMM_SPLIT_SHARE_RESOURCES",
)


def key_of(**facts: Any) -> str:
    """A digest of these facts and of the machine: its name, processors, GPUs, and the versions that run on it."""
    known = {
        "version": _VERSION,
        "host": socket.gethostname(),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "settings": {name: os.environ.get(name) for name in _SETTINGS},
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        **facts,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def cached_file(kind: str, key: str) -> Path:
    """Where a profile of this kind and key is kept: under ``GALVATRON_CACHE``, or the user's own cache."""
    folder = os.environ.get("GALVATRON_CACHE")
    base = Path(folder) if folder else Path("~/.cache/galvatron").expanduser()
    return base / "profiles" / f"{kind}-{key}.toml"


def keep(path: Path, content: str) -> None:
    """Write it whole or not at all; where nothing can be written, the next time measures again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(content, encoding="utf-8")
        aside.replace(path)


def _version(name: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """As NVIDIA's driver lists them: asking torch would take seconds."""
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    texts = []
    for path in found:
        with suppress(OSError):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return texts
