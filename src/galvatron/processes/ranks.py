"""On the side of the ranks: started by the helper process, or by torchrun."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import threading
import traceback
import warnings
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.processes.environment import settle
from galvatron.processes.job import PROGRESS, Job, Progress
from galvatron.processes.peers import Peers, Report
from galvatron.processes.virtual import virtual_devices
from galvatron.processes.world import claim_device, meet

__all__ = ["run_all", "run_here"]

_NUMBERS = count()
"""Of the jobs that a process has had, which share a store."""


def run_here(job: Job, progress: Progress | None) -> Any:
    """Be one of the ranks that torchrun started; every one of them gets rank 0's result."""
    rank = int(os.environ["RANK"])
    peers = _peers(progress if progress is not None and rank == 0 else _silent)
    if job.devices is not None and job.devices != peers.world:
        raise InvalidInput(f"devices: {job.devices} given, but torchrun started {peers.world} processes; leave it out")
    return peers.share(job.measure(peers))


def run_all(job: Job, answer: Path) -> None:
    """Start the ranks, run the job on them, and leave rank 0's result, or what went wrong, in the file."""
    gpus = virtual_devices() or torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    world = job.devices or gpus or max(cores, 2)
    if gpus and world > gpus:
        _leave(answer, InvalidInput(f"devices: {world} given, but this machine has {gpus} GPUs; give at most that"))
        return
    job.prepare()
    settle()
    # A process that has used CUDA cannot be forked, and counting its devices may count as use.
    context: Any = multiprocessing.get_context("spawn" if gpus else "fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes: list[Connection] = []
    processes = []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(job, rank, world, port, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        _leave(answer, _answers(pipes))
    finally:
        for process in processes:
            process.kill()


def _answers(pipes: list[Connection]) -> Any:
    """Rank 0's result, or the first error."""
    waiting, result = dict(enumerate(pipes)), None
    while waiting:
        ready = wait(list(waiting.values()))
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                fine, value = waiting.pop(rank).recv()
            except EOFError:
                return GalvatronError(f"profiling: rank {rank} ended without a word; there may be too little memory")
            if not fine:
                return value
            result = value if rank == 0 else result
    return result


def _rank(job: Job, rank: int, world: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    warnings.simplefilter("ignore")
    try:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        settle()
        peers = _peers(_told if rank == 0 else _silent)  # by name, so that it lives as long as this process
        pipe.send((True, job.measure(peers)))
    except GalvatronError as error:
        pipe.send((False, error))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"profiling: rank {rank} failed in {last.name}: {type(error).__name__}: {error}"
        pipe.send((False, GalvatronError(text)))
    threading.Event().wait()  # until all are done: rank 0 has the store that the others still read


def _peers(report: Report) -> Peers:
    store, rank, world = meet()
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = claim_device(rank, in_turn=True)  # what is measured is one program
    own_store = PrefixStore(f"galvatron/profiler/{next(_NUMBERS)}", store)
    return Peers(rank=rank, world=world, local_world=local_world, device=device, store=own_store, report=report)


def _told(done: int, total: int, what: str) -> None:
    sys.stdout.write(f"{PROGRESS}{done} {total} {what}\n")
    sys.stdout.flush()


def _silent(done: int, total: int, what: str) -> None:
    pass


def _leave(answer: Path, result: Any) -> None:
    answer.write_bytes(pickle.dumps(result))
