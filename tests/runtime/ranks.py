"""Ranks for tests: processes that are started once, joined by gloo, and then run one function after another.

Forked from this process after torch is imported, because importing it costs seconds in each.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_LIMIT_S = 90


class RankError(AssertionError):
    """A rank's function raised."""


class Ranks:
    """So many processes; :meth:`run` calls a function in each of them and returns what each returned."""

    def __init__(self, world: int) -> None:
        self.world = world
        context = multiprocessing.get_context("fork")
        self._store = tempfile.NamedTemporaryFile(prefix="ranks-", delete=False)  # noqa: SIM115
        os.unlink(self._store.name)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, self._store.name, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self.broken = False

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on each rank. After a failure the ranks are out of step, so they are stopped."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=_LIMIT_S)
            failed = None
            if not ready:
                failed = f"ranks {sorted(waiting)} did not answer within {_LIMIT_S} s"
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    fine, result = waiting.pop(rank).recv()
                except EOFError:
                    fine, result = False, "the process ended"
                if not fine:
                    failed = failed or f"rank {rank} of {self.world}:\n{result}"
                results[rank] = result
            if failed:
                self.stop()
                raise RankError(failed)
        return [results[rank] for rank in range(self.world)]

    def stop(self) -> None:
        self.broken = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
