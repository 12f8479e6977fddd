"""What lasts is out of the collector's sight; what comes later is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from galvatron.processes.environment import settle


class Knot:
    """Garbage that only the collector can find, once nobody holds it."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_passes_over_what_lasts() -> None:
    lasting = Knot()
    settle()
    assert not any(one is lasting for one in gc.get_objects())


def test_garbage_from_before_does_not_stay() -> None:
    gone = weakref.ref(Knot())
    settle()
    assert gone() is None


def test_garbage_from_afterwards_is_found() -> None:
    settle()
    gone = weakref.ref(Knot())
    gc.collect()
    assert gone() is None
