"""Jobs for the profiler's ranks, which import them by name."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from galvatron.processes.crew import Crew


@dataclass(frozen=True)
class FrozenObjects:
    """How many objects the garbage collector passes over, on each rank."""

    devices: int = 2

    def prepare(self) -> None:
        pass

    def measure(self, crew: Crew) -> list[int]:
        return crew.gather(gc.get_freeze_count())


@dataclass(frozen=True)
class LateReader:
    """Rank 1 still reads what the ranks tell each other when rank 0 is done."""

    devices: int = 2

    def prepare(self) -> None:
        pass

    def measure(self, crew: Crew) -> None:
        crew.store.set(f"from {crew.rank}", "a word")
        if crew.rank == 1:
            time.sleep(1)
            assert crew.store.get("from 0") == b"a word"
