"""Ranks agree to stop after the same step, whichever of them was asked to, without holding up training.

Over a group of its own on the CPU: the question is asked when a step begins and answered when it ends.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["Agreement"]


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
