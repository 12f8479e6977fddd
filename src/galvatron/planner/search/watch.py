"""How long a search may take, and who hears that it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["UNWATCHED", "OutOfTime", "Tell", "Watch"]

Tell = Callable[[float, float | None], None]
"""Hears for how many seconds a search has gone on, and by how much its best plan may be beaten; None: it has none."""

_FIRST_S = 1.0
"""Searches that take less are not spoken of."""
_EVERY_S = 0.5


class OutOfTime(Exception):
    """The time is up: what was found so far must do. Stays inside the search."""


class Watch:
    """One search's time, from now on."""

    def __init__(self, limit_s: float | None = None, tell: Tell | None = None) -> None:
        self._limit_s, self._tell = limit_s, tell
        self._started = time.monotonic()
        self._next_s = _FIRST_S
        self._gap: float | None = None

    def reached(self, gap: float | None) -> None:
        """By how much the best plan so far may still be beaten."""
        self._gap = gap

    def check(self) -> None:
        """Called all the time; raises :class:`OutOfTime`."""
        if self._limit_s is None and self._tell is None:
            return
        elapsed = time.monotonic() - self._started
        if self._tell is not None and elapsed >= self._next_s:
            self._next_s = elapsed + _EVERY_S
            self._tell(elapsed, self._gap)
        if self._limit_s is not None and elapsed >= self._limit_s:
            raise OutOfTime


UNWATCHED = Watch()
"""Never stops anything, and tells nobody."""
