"""Makes the benchmarks and the oracles of the tests importable: tests have no packages of their own."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import hypothesis
import pytest

# No deadlines: others may be at work on the machine.
hypothesis.settings.register_profile("short", deadline=None, max_examples=40)
hypothesis.settings.register_profile("longer", deadline=None, max_examples=200)

_HERE = Path(__file__).parent
_ORACLES = (
    "planner/search", "planner/cost", "planner/exchange", "planner/pages", "families", "runtime", "runtime/context",
    "measure", "measure/rehearsal", "train", "train/checkpoints", "core/files", "benchmarks", "studio",
)  # fmt: skip
for folder in (
    _HERE.parent / "benchmarks",
    _HERE.parent / "benchmarks" / "paper",
    *(_HERE / name for name in _ORACLES),
):
    sys.path.insert(0, str(folder))

_WORLDS = {
    "runtime": (1, 2, 4, 6, 8), "runtime/context": (2, 4, 6, 8), "measure/rehearsal": (4,),
    "train/checkpoints": (1, 4, 8), "train/data": (2,), "benchmarks": (4,), "cli": (1,),
}  # fmt: skip
"""Sizes of the shared ranks that the tests of each folder use."""


_ORDER = ("train", "measure", "benchmarks", "processes", "runtime", "cli", "planner/search", "")
"""Folders whose tests take long, before the others."""


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is read: more examples in the longer run."""
    hypothesis.settings.load_profile("short" if config.getoption("markexpr") == "not slow" else "longer")


def _folder(item: pytest.Item) -> str:
    return item.path.parent.relative_to(_HERE).as_posix()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: files are dealt out in this order, and no worker should be left with a long one alone."""
    items.sort(key=lambda item: next(place for place, name in enumerate(_ORDER) if _folder(item).startswith(name)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the ranks that tests share before any test runs: forked from a process in which profilers and thread pools
    are at work, one of them may come up broken."""
    folders = {_folder(item) for item in getattr(session, "items", ())}
    if "train" in folders:
        from jobs import server

        server()
    worlds = {world for folder, sizes in _WORLDS.items() if folder in folders for world in sizes}
    if worlds:
        from ranks import ranks

        for world in sorted(worlds):
            ranks(world).run(int)
    gc.collect()
    gc.freeze()  # PyTorch and all tests: else the collector would go through them again and again
