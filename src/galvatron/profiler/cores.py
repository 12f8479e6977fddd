"""Processor cores: how many there are for us, how busy they are, and with what. Without /proc nothing is known.

Processes that share cores are slowed by each other, which belongs into a profile, and by other people's, which does
not.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Moment", "cores", "disturbance"]


def cores() -> float:
    """Cores that this process may use: those it is bound to, or fewer where a container has a quota."""
    bound = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return min(bound, int(quota) / int(period))
    except (OSError, ValueError):  # no control groups, or no quota ("max")
        return bound


@dataclass(frozen=True, slots=True)
class Moment:
    """Clocks at one moment, in seconds."""

    wall_s: float
    own_s: float
    """Processor time of this process."""
    busy_s: float | None
    """Processor time of all processes on the machine."""

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time(), _busy_s())


def _busy_s() -> float | None:
    try:
        with Path("/proc/stat").open(encoding="utf-8") as file:
            fields = [int(field) for field in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def disturbance(before: Moment, after: Moment, ours_s: float) -> float:
    """The part of the machine's time between two moments that others took; ``ours_s``: what our ranks took."""
    if before.busy_s is None or after.busy_s is None:
        return 0.0
    capacity = (os.cpu_count() or 1) * max(after.wall_s - before.wall_s, 1e-9)
    return min(max((after.busy_s - before.busy_s - ours_s) / capacity, 0.0), 1.0)
