"""What ranks started for a purpose are to do, and how their progress is said. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from galvatron.processes.peers import Peers

__all__ = ["PROGRESS", "Job", "Progress"]

Progress = Callable[[int, int, str], None]
"""Told how far measuring has come: steps done, steps in all, what is measured now."""
PROGRESS = "galvatron-progress "
"""How a line about progress begins, from the process that measures."""


class Job(Protocol):
    """What the ranks are to measure; it is sent to them."""

    @property
    def devices(self) -> int | None:
        """Ranks to start; None: one for each GPU, or for each core where there is none."""

    def prepare(self) -> None:
        """Import what takes long, before the ranks are forked."""

    def measure(self, peers: Peers) -> Any:
        """On each rank; what rank 0 returns is the result."""
