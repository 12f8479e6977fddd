"""Where a run's time goes besides its steps: each phase has a name, its seconds in the report, and a line on the screen
if it takes long. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Phases"]

_SILENT_S = 2.0
"""A phase that takes longer says what it is."""


class Phases:
    """The phases of a run so far, in seconds, in the order they began."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        """``say``: shows a line; None: this process keeps silent."""
        self.seconds: dict[str, float] = {}
        self._say = say

    def add(self, name: str, seconds: float) -> None:
        """Time that was taken elsewhere; a phase that comes again adds up."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def phase(self, name: str, what: str | None = None, *, silent: bool = False) -> Iterator[None]:
        """Take the time of what is done meanwhile. ``what``: said of it if it takes long; else its name."""
        say = None if silent else self._say
        line = threading.Timer(_SILENT_S, say, (f"{what or name} …",)) if say is not None else None
        if line is not None:
            line.daemon = True
            line.start()
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)
            if line is not None:
                line.cancel()
