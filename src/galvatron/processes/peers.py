"""The ranks that measure together: they wait for each other, agree on numbers and exchange results through a store.

A store, and no process group, so that layers can be measured in a world in which the other ranks do not exist.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from galvatron.processes.cores import cores

__all__ = ["Peers", "Report"]

Report = Callable[[int, int, str], None]
"""Told how far measuring has come: steps done, steps in all, what is measured now."""
_PATIENCE = timedelta(minutes=10)


@dataclass(kw_only=True)
class Peers:
    """This rank among the others."""

    rank: int
    world: int
    local_world: int
    """Ranks on this machine."""
    device: torch.device
    store: Store
    report: Report
    _met: int = field(default=0, init=False)

    def join(self) -> None:
        """Make the default process group of all ranks."""
        store = PrefixStore("group", self.store)
        if self.device.type == "cuda":
            dist.init_process_group(
                "nccl", store=store, rank=self.rank, world_size=self.world, device_id=self.device, timeout=_PATIENCE
            )
        else:
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world, timeout=_PATIENCE)

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, in the order of ranks; values are what JSON can say."""
        self._met += 1
        self.store.set(f"{self._met}/{self.rank}", json.dumps(value))
        names = [f"{self._met}/{rank}" for rank in range(self.world)]
        self.store.wait(names, _PATIENCE)
        return [json.loads(text) for text in self.store.multi_get(names)]  # one answer: a network may be slow

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank. Rank 0 leaves last: the store may be a part of its process."""
        self._met += 1
        if self.rank == 0:
            self.store.set(f"{self._met}/shared", pickle.dumps(value).hex())
            self.store.wait([f"{self._met}/read/{rank}" for rank in range(1, self.world)], _PATIENCE)
            return value
        self.store.wait([f"{self._met}/shared"], _PATIENCE)
        shared = pickle.loads(bytes.fromhex(self.store.get(f"{self._met}/shared").decode()))
        self.store.set(f"{self._met}/read/{self.rank}", "")
        return shared

    def meet(self) -> None:
        """Wait until all are here."""
        self._met += 1
        if self.store.add(f"{self._met}/count", 1) == self.world:
            self.store.set(f"{self._met}/all", "")
        self.store.wait([f"{self._met}/all"], _PATIENCE)

    @cached_property
    def contention(self) -> float:
        """How many ranks' threads there are for each core; one where they have cores, or GPUs, of their own."""
        return 1.0 if self.device.type == "cuda" else max(1.0, self.local_world * torch.get_num_threads() / cores())

    def compute_clock(self) -> float:
        """Seconds of computing on the CPU while all ranks compute: processor time, as long as it lasts when they share
        the cores evenly. Unlike the wall clock's, these seconds do not depend on other people's processes."""
        return time.process_time() / torch.get_num_threads() * self.contention

    def wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
