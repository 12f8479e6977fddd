"""Where measured figures come from: what goes into the ``source`` of a file."""

from __future__ import annotations

import importlib.metadata
import os
import time

import galvatron
from galvatron.profiler.figures import Quality

__all__ = ["provenance"]


def provenance(what: str, quality: Quality) -> str:
    """One line: what was measured, when, with which versions, and how well it repeats."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers") if _installed(name)
    )
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    day = time.strftime("%Y-%m-%d")
    by = f"measured {day} by galvatron {galvatron.__version__}"
    return f"{by} on {what}, {threads} thread(s) a process; {versions}; {quality}"


def _installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False
