"""A job for the profiler's ranks, which import it by name."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from galvatron.profiler.crew import Crew


@dataclass(frozen=True)
class FrozenObjects:
    """How many objects the garbage collector passes over, on each rank."""

    devices: int = 2

    def prepare(self) -> None:
        pass

    def measure(self, crew: Crew) -> list[int]:
        return crew.gather(gc.get_freeze_count())
