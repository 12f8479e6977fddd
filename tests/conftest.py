"""Makes the benchmarks and the oracles of the tests importable: tests have no packages of their own."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_ORACLES = ("search", "models", "runtime", "rehearsal", "checkpoints", "profiler", "train", "paper", "zoo")
for folder in (
    _HERE.parent / "benchmarks",
    _HERE.parent / "benchmarks" / "paper",
    *(_HERE / name for name in _ORACLES),
):
    sys.path.insert(0, str(folder))

_WORLDS = {"runtime": (2, 4, 6, 8), "rehearsal": (4,), "checkpoints": (4, 8), "data": (2,), "paper": (4,)}
"""Sizes of the shared ranks that the tests of each folder use."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole trainings first: files are dealt out in this order, and no worker should be left with a long one alone."""
    items.sort(key=lambda item: "train" not in item.path.parts)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the ranks that tests share before any test runs: forked from a process in which profilers and thread pools
    are at work, one of them may come up broken."""
    folders = {part for item in getattr(session, "items", ()) for part in item.path.parts}
    worlds = {world for folder, sizes in _WORLDS.items() if folder in folders for world in sizes}
    if worlds:
        from ranks import ranks

        for world in sorted(worlds):
            ranks(world).run(int)
    gc.collect()
    gc.freeze()  # PyTorch and all tests: else the collector would go through them again and again
