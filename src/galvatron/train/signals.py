"""SIGTERM and Ctrl-C: a request to stop after the current step, heard even while the main thread waits in a collective.

Python runs signal handlers in the main thread only, between two of its instructions; a rank that waits for others in
native code would never get there. The number of the signal is also written to a pipe at once, which a thread reads.
"""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

__all__ = ["StopRequest"]


class StopRequest:
    """Takes the place of what these signals do otherwise. Made in the main thread."""

    def __init__(self) -> None:
        self.made = False
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        os.set_blocking(self._read, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.made = True

    def wait(self, seconds: float) -> None:
        """Until a signal comes, or for so long; for threads other than the main one."""
        if select.select([self._read], [], [], seconds)[0] and os.read(self._read, 64):
            self.made = True
