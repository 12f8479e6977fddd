"""Jobs for the profiler's ranks, which import them by name."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from galvatron.processes.peers import Peers


@dataclass(frozen=True)
class FrozenObjects:
    """How many objects the garbage collector passes over, on each rank."""

    devices: int = 2

    def prepare(self) -> None:
        pass

    def measure(self, peers: Peers) -> list[int]:
        return peers.gather(gc.get_freeze_count())


@dataclass(frozen=True)
class LateReader:
    """Rank 1 still reads what the ranks tell each other when rank 0 is done."""

    devices: int = 2

    def prepare(self) -> None:
        pass

    def measure(self, peers: Peers) -> None:
        peers.store.set(f"from {peers.rank}", "a word")
        if peers.rank == 1:
            time.sleep(1)
            assert peers.store.get("from 0") == b"a word"
