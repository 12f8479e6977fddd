"""Ranks at once: one process imports everything that is slow to import, and forks the ranks of each run from itself.

It never touches CUDA, because a process that has cannot be forked; it has no thread but its own. Should an import have
touched it all the same, ranks are started anew instead, and import everything themselves. Every run has fresh ranks.
When one of them fails, or time is up, all others are killed: a rank that waits for a lost one in NCCL would wait for
ever.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol

from galvatron.processes.environment import defaults_if_unset, settle

__all__ = ["ForkServer", "Outcome", "RankJob", "run_ranks"]

_SPAWN = multiprocessing.get_context("spawn")
_FORK = multiprocessing.get_context("fork")
_NOT_INITIALIZED = 3
"""What CUDA's driver says in a process forked from one that uses it."""
_GRACE_S = 0.5
"""How long others may still speak after the first failure: a lost connection may be noticed before the loss."""
_TELLING = ("oom", "dead", "failed")
"""Ways to fail, causes before what they bring about."""
_PATIENCE_S = 5.0
"""For ranks to end by themselves: one that is killed at work may take the GPU's server with it."""


class RankJob(Protocol):
    """What each rank of a run does; it is sent to them."""

    def run(self, rank: int) -> Any:
        """On each rank, whose environment is that of torchrun; all results are sent back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a run."""

    status: str
    """``ok``, ``oom`` or ``failed``."""
    message: str
    results: tuple[Any, ...]
    """Of each rank, where all went well."""


class ForkServer:
    """The process that forks ranks. ``prepare`` imports what they need; it must be importable by name."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._pipe, there = _SPAWN.Pipe()
        # Torch would otherwise ask CUDA, not the driver's library, whether there is a GPU.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ.update(defaults_if_unset())
        os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler, which counts memory on CPUs, would announce itself
        self._process = _SPAWN.Process(target=_serve, args=(prepare, there))
        self._process.start()
        there.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join()

    def run(self, job: RankJob, ranks: int, environment: Mapping[str, str], limit_s: float) -> Outcome:
        """Run the job on so many fresh ranks, each with this added to its environment, for at most this long."""
        self._pipe.send((job, ranks, dict(environment), limit_s))
        outcome: Outcome = self._pipe.recv()
        return outcome


def _serve(prepare: Callable[[], None], pipe: Connection) -> None:
    """In the fork_server, until whoever started it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()
    settle()
    context = _FORK if _can_fork() else _SPAWN
    while True:
        try:
            job, ranks, environment, limit_s = pipe.recv()
        except EOFError:
            return
        pipe.send(run_ranks(job, ranks, environment, limit_s, context))


def _can_fork() -> bool:
    """Whether a forked process can use CUDA, tried out in one; without CUDA's driver it need not."""
    trial = _FORK.Process(target=_try_cuda)
    trial.start()
    trial.join()
    return trial.exitcode == 0


def _try_cuda() -> None:
    import torch

    bad = torch.cuda._is_in_bad_fork()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        os._exit(int(bad))
    os._exit(int(bad or driver.cuInit(0) == _NOT_INITIALIZED))


def run_ranks(job: RankJob, ranks: int, environment: dict[str, str], limit_s: float, context: Any) -> Outcome:
    """Start ranks by this context of ``multiprocessing`` and wait for what becomes of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe()
        own = {**environment, **world, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        process = context.Process(target=_be_rank, args=(job, rank, own, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    outcome = _answers(pipes, time.monotonic() + limit_s, limit_s)
    if outcome.status == "ok":
        for pipe in pipes:
            with suppress(OSError):  # a rank may have died since
                pipe.send("end")
        for process in processes:
            process.join(_PATIENCE_S)
    for process in processes:
        process.kill()
        process.join()
    return outcome


def _answers(pipes: list[Connection], end: float, limit_s: float) -> Outcome:
    waiting = dict(enumerate(pipes))
    results: dict[int, Any] = {}
    lost: list[Outcome] = []
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                status, value = waiting.pop(rank).recv()
            except (EOFError, ConnectionResetError):
                status, value = "dead", "ended without a word"
            results[rank] = value
            if status != "ok":
                lost.append(Outcome(status=status, message=f"rank {rank}: {value}", results=()))
                end = min(end, time.monotonic() + _GRACE_S)
    if lost:
        told = min(lost, key=lambda one: _TELLING.index(one.status))
        return replace(told, status="oom" if told.status == "oom" else "failed")
    if waiting:
        return Outcome(status="failed", message=f"not done after {limit_s:.0f} s", results=())
    return Outcome(status="ok", message="", results=tuple(results[rank] for rank in sorted(results)))


def _be_rank(job: RankJob, rank: int, environment: dict[str, str], pipe: Connection) -> None:
    os.environ.update(environment)
    try:
        pipe.send(("ok", job.run(rank)))
    except BaseException as error:
        pipe.send(_told(error))
    pipe.recv()  # until all are done: rank 0 has the store that the others still read
    os._exit(0)  # without waiting for groups: their other members may be gone


def _told(error: BaseException) -> tuple[str, str]:
    import torch

    text = f"{type(error).__name__}: {error}".split("\n", 1)[0][:500]
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return "oom", text
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "failed", f"{text} (in {last.name}, {os.path.basename(last.filename)} line {last.lineno})"
