"""Real training jobs for tests: ranks forked from a server that has everything imported, so that they start at once.

They find what torchrun would give them: their numbers, and a store that outlives each of them.
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from oracle import Case
from parity import plan_for
from small_models import config
from torch._C._distributed_c10d import TCPStore

import galvatron
from galvatron.train.metrics import read_metrics
from galvatron.train.run_folder import RunFolder
from galvatron.train.settings import Settings

__all__ = ["Job", "plan_of", "run_to_end", "server"]

_LIMIT_S = 120.0
_FAMILIES = ("bert", "gpt2", "llama", "swin", "t5", "vit")


@cache
def server() -> ForkServerContext:
    """The server, forked from this process before its tests start threads: a new process would import all again."""
    modelling = [f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES]
    modelling += [f"galvatron.families.{family}.{part}" for family in _FAMILIES for part in ("facts", "adapter")]
    plans = ["galvatron.planner.plan.reading", "pydantic.dataclasses", "pydantic.type_adapter"]
    for name in ("galvatron.train.worker", "torch._dynamo", "safetensors.torch", *plans, *modelling):
        importlib.import_module(name)
    resource_tracker.ensure_running()
    with patch.object(util, "spawnv_passfds", _forked):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def _forked(_: object, arguments: Sequence[Any], kept: Sequence[int]) -> int:
    """In place of a new interpreter: a fork of this one, which runs the same program and has the same files open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: those of pytest serve no one
        pid = os.fork()
    if pid:
        return pid
    try:
        logging.getLogger().handlers.clear()  # pytest's write to files that are closed here, whose numbers others get
        low = 3
        for own in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
            os.closerange(low, own)
            low = own + 1
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def plan_of(
    *stages: Sequence[str], family: str = "bert", batch: int = 8, micro_batches: int = 1, schedule: str = "1f1b"
) -> galvatron.Plan:
    """A plan for a small model, by hand."""
    chosen = [list(stage) for stage in stages]
    case = Case(
        config=config(family),
        stages=chosen,
        batch=batch,
        micro_batches=micro_batches,
        schedule=schedule,
        dtype=torch.float32,
    )
    return plan_for(case)


class Job:
    """The ranks of a run, under way; ``tamper(rank)`` is called in each of them before it trains."""

    def __init__(
        self,
        path: Path,
        plan: galvatron.Plan,
        settings: Settings,
        tamper: Callable[..., None] | None = None,
        *args: Any,
    ) -> None:
        self.folder, self.world = RunFolder(path), plan.cluster.devices
        self.folder.begin(plan, settings)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[BaseProcess] = []
        for rank in range(self.world):
            facts = (path, rank, self.world, self._store.port, tamper, args)
            process = server().Process(target=_rank, args=facts, daemon=True)
            process.start()
            self.processes.append(process)

    def wait(self, limit_s: float = _LIMIT_S) -> list[int]:
        """Exit codes of all ranks."""
        end = time.monotonic() + limit_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in late:
            self.signal(signal.SIGKILL, rank)
            self.processes[rank].join()
        assert not late, f"ranks {late} were still running after {limit_s} s\n{self.logs()}"
        return [process.exitcode or 0 for process in self.processes]

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, number)

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + _LIMIT_S
        while not any(line["step"] >= step for line in self.metrics()):
            assert time.monotonic() < end, self.logs()
            assert all(process.exitcode is None for process in self.processes), self.logs()
            time.sleep(0.02)

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder.metrics_file)

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics()]

    def logs(self) -> str:
        texts = ((rank, self.folder.path / f"rank{rank}.log") for rank in range(self.world))
        return "\n".join(f"rank {rank}:\n{path.read_text()}" for rank, path in texts if path.exists())


def run_to_end(path: Path, plan: galvatron.Plan, settings: Settings) -> Job:
    """Train in order."""
    job = Job(path, plan, settings)
    assert job.wait() == [0] * job.world, job.logs()
    return job


def _rank(
    path: Path, rank: int, world: int, port: int, tamper: Callable[..., None] | None, args: tuple[Any, ...]
) -> None:
    gc.freeze()  # what is inherited is never collected: looking at it would copy its pages
    log = os.open(path / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        KINETO_LOG_LEVEL="99",
    )
    from galvatron.train.worker import train_rank

    try:
        if tamper is not None:
            tamper(rank, *args)
        train_rank(path)
    except BaseException as error:  # as the interpreter does at the end of a program, which this is not
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)
    os._exit(0)
