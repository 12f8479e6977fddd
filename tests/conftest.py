"""Makes the benchmarks and the oracles of the tests importable: tests have no packages of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
for folder in (_HERE.parent / "benchmarks", *(_HERE / name for name in ("search", "models", "runtime", "rehearsal"))):
    sys.path.insert(0, str(folder))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the ranks that tests of runtime and data share before any test runs: forked from a process in which
    profilers and thread pools are at work, one of them may come up broken."""
    folders = {folder for item in session.items for folder in item.path.parts}
    worlds = (2, 4, 6, 8) if "runtime" in folders else (2,) if "data" in folders else ()
    if worlds:
        from ranks import ranks

        for world in worlds:
            ranks(world).run(int)
