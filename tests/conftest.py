"""Makes the benchmarks and the oracles of the tests importable: tests have no packages of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
for name in ("search", "models", "runtime", "rehearsal", "profiler"):
    sys.path.insert(0, str(_HERE / name))
sys.path.insert(0, str(_HERE.parent / "benchmarks"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the ranks that tests of the runtime share before any test runs: forked from a process in which profilers
    and thread pools are at work, one of them may come up broken."""
    if any("runtime" in item.path.parts for item in session.items):
        from ranks import ranks

        for world in (2, 4, 6, 8):
            ranks(world).run(int)
