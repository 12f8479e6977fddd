"""Processor cores: how many there are for us, how busy they are, and with what. Without /proc nothing is known.

Processes that share cores are slowed by each other, which belongs into a profile, and by other people's, which does
not.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Moment", "Shares", "cores", "machine", "shares"]


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


@dataclass(frozen=True, slots=True)
class Shares:
    """Processor time between two moments, over the time between: 1 is one core, all the time."""

    cores: int
    ours: float
    others: float

    @property
    def disturbed(self) -> float:
        """The part of the machine that others took."""
        return self.others / self.cores

    @property
    def lost(self) -> float:
        """The part of the time between that others took from us, as far as can be told.

        Working on the cores that others leave takes ours / (cores - others) of the time, and with all cores to
        ourselves it would take ours / cores: the difference is lost. But no more than we worked: a fair scheduler lets
        nobody wait much longer than he runs, and from waiting for a network nothing can be taken.
        """
        working = min(self.ours / max(self.cores - self.others, 1e-9), 1.0)
        return min(working * self.disturbed, self.ours)


def shares(before: Moment, after: Moment, ours_s: float) -> Shares:
    """Who had the cores between two moments; ``ours_s``: what our ranks on this machine took."""
    count, wall_s = os.cpu_count() or 1, max(after.wall_s - before.wall_s, 1e-9)
    others_s = 0.0
    if before.busy_s is not None and after.busy_s is not None:
        others_s = max(after.busy_s - before.busy_s - ours_s, 0.0)
    return Shares(count, ours_s / wall_s, min(others_s / wall_s, count))


def machine() -> str:
    """Equal for processes whose cores are counted together."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
