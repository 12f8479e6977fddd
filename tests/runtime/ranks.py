"""Ranks for tests: processes that are started once, joined by gloo, and then run one function after another.

Forked from this process after all that they need is imported, because importing it costs seconds in each.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from queues import Noted, note_messages, stuck
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

__all__ = ["RankError", "Ranks", "ranks"]

# A process forked from one that has computed in several threads waits for ever for threads it did not inherit. Tests
# are collected before any runs, so this is in time; oneDNN, which has threads of its own, is left out on the ranks.
torch.set_num_threads(1)

_LIMIT_S = 180
_LIFE = 10
"""Runs of one set of processes: PyTorch's caches of DTensors keep groups, and with each of them three threads."""
_FAMILIES = ("bert", "gpt2", "llama", "swin", "t5", "vit")
_MODULES = (
    "galvatron.runtime.parallelize",
    "galvatron.planner.plan.reading",
    "galvatron.train.checkpoints.checkpoints",
    "pydantic.dataclasses",
    "pydantic.type_adapter",
    "safetensors.torch",
    "torch._dynamo",
    *(f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES),
    *(f"galvatron.families.{family}.{part}" for family in _FAMILIES for part in ("facts", "adapter")),
)


class RankError(AssertionError):
    """A rank's function raised, or did not come back."""


class Ranks:
    """So many processes; :meth:`run` calls a function in each of them and returns what each returned.

    It fails where they would have hung with NCCL (:mod:`queues`).
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._runs = 0

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on each rank. After a failure the ranks are out of step, so new ones will be started."""
        if self._runs == _LIFE:
            self.stop()
        if not self._processes:
            self._start()
        self._runs += 1
        job = _packed((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        results: dict[int, Any] = {}
        noted: dict[int, list[Noted]] = {}
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=_LIMIT_S)
            failed = None if ready else self._stuck(sorted(waiting))
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    fine, results[rank], noted[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
                except (EOFError, OSError):
                    fine, results[rank] = False, "the process ended"
                if not fine:
                    failed = failed or f"rank {rank} of {self.world}:\n{results[rank]}"
            if failed:
                self.stop()
                raise RankError(failed)
        hanging = stuck([noted[rank] for rank in range(self.world)])
        if hanging:
            raise RankError(
                f"these ranks went on over gloo, but would wait for each other for ever in NCCL:\n{hanging}"
            )
        return [results[rank] for rank in range(self.world)]

    def _stuck(self, waiting: list[int]) -> str:
        """Where the ranks that do not answer are."""
        stacks = []
        for rank in waiting:
            pid = self._processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.2)
            stacks.append(f"rank {rank}:\n{(self._stacks / str(rank)).read_text()}")
        return f"ranks {waiting} did not answer within {_LIMIT_S} s\n" + "\n".join(stacks)

    def stop(self) -> None:
        """End the processes; the next :meth:`run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._runs = [], [], 0

    def _start(self) -> None:
        for name in _MODULES:
            importlib.import_module(name)
        self._stacks = Path(tempfile.mkdtemp(prefix="ranks-"))
        atexit.register(shutil.rmtree, self._stacks, ignore_errors=True)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("fork")
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, self._store.port, self._stacks, there), daemon=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: the store's serve no one
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.send_bytes(b"")


@cache
def ranks(world: int) -> Ranks:
    """The ranks that all tests of this world size share."""
    shared = Ranks(world)
    atexit.register(shared.stop)
    return shared


def _serve(rank: int, world: int, port: int, stacks: Path, pipe: Connection) -> None:
    pipe.recv_bytes()  # connecting while others are forked would leave them locks that the store's thread holds
    faulthandler.register(signal.SIGUSR1, file=(stacks / str(rank)).open("w"))
    gc.freeze()  # what is inherited is never collected: looking at it would copy its pages
    warnings.simplefilter("ignore")
    torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
    if "torch._inductor.async_compile" in sys.modules:  # it may have compiled: its threads were not inherited
        sys.modules["torch._inductor.async_compile"].AsyncCompile.pool.cache_clear()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    notes = note_messages()
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, function(*args), notes.take()
        except BaseException:
            answer = False, traceback.format_exc(), notes.take()
        pipe.send_bytes(_packed(answer))
        del function, args, answer
        _drop_groups()


class _Pickler(pickle.Pickler):
    """Plain tensors go as their bytes: PyTorch would write a file for each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or value.layout != torch.strided or value.is_meta:
            return NotImplemented
        return _unpacked, (value.contiguous().flatten().view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _unpacked(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(content).view(dtype).view(shape)


def _packed(value: object) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def _drop_groups() -> None:
    """Give back the groups that the function made: each has threads and sockets of its own."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
