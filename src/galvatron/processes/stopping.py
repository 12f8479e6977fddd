"""Stopping after the same step everywhere: signals ask for it, and the ranks agree."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["Agreement", "StopRequest"]


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


class Agreement:
    """One question at a time."""

    def __init__(self) -> None:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, ProcessGroup)
        self.group = group
        self._asked = torch.zeros((), dtype=torch.int32)
        self._work: dist.Work | None = None

    def ask(self, wish: bool) -> None:
        self._asked.fill_(int(wish))
        self._work = dist.all_reduce(self._asked, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def answer(self) -> bool:
        """Whether any rank wished it."""
        assert self._work is not None
        self._work.wait()
        return bool(self._asked)
