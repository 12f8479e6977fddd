"""Real training jobs for tests: ranks forked from this process, which has everything imported, so that they start at
once. They find what torchrun would give them: their numbers, and a store that outlives each of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from ranks import prepare_fork
from small_models import config
from torch._C._distributed_c10d import TCPStore

import galvatron
from galvatron.plans.by_hand import priced
from galvatron.plans.setup import Setup, request_for
from galvatron.train.metrics import read_metrics
from galvatron.train.run_folder import RunFolder
from galvatron.train.settings import Settings
from galvatron.train.worker import train_rank

__all__ = ["Job", "begin", "plan_of", "run_to_end"]

_LIMIT_S = 120.0


def plan_of(
    stages: Sequence[Sequence[str]], *, family: str = "bert", batch: int = 8, micro_batches: int = 1
) -> galvatron.Plan:
    """A plan for a small model by hand."""
    devices = sum(galvatron.Strategy.parse(stage[0]).devices for stage in stages)
    length = {} if family in ("vit", "swin") else {"sequence_length": 8}
    setup = Setup(batch=batch, precision="fp32", dropout=None, **length)  # type: ignore[arg-type]
    request = request_for(config(family), flat_cluster(devices), setup)
    return priced(request, [list(stage) for stage in stages], micro_batches=micro_batches)


def flat_cluster(devices: int) -> Any:
    from holdings import flat_cluster as flat

    return flat(devices)


def begin(path: Path, plan: galvatron.Plan, settings: Settings) -> RunFolder:
    folder = RunFolder(path)
    folder.begin(plan, settings)
    return folder


@dataclass
class Job:
    """The ranks of a run, under way. ``tamper`` is called in each rank before it trains."""

    folder: RunFolder
    world: int
    tamper: Callable[[int], None] | None = None
    processes: list[BaseProcess] = field(default_factory=list)

    def start(self) -> Job:
        prepare_fork()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("fork")
        for rank in range(self.world):
            process = context.Process(target=self._rank, args=(rank,), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            self.processes.append(process)
        return self

    def _rank(self, rank: int) -> None:
        os.setpgid(0, 0)
        with (self.folder.path / f"rank{rank}.log").open("w") as log:
            os.dup2(log.fileno(), sys.stdout.fileno() if sys.stdout.fileno() > 0 else 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        sys.excepthook = sys.__excepthook__
        warnings.simplefilter("ignore")
        torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self.world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._store.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        try:
            if self.tamper is not None:
                self.tamper(rank)
            train_rank(self.folder.path)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)
        os._exit(0)

    def wait(self, limit_s: float = _LIMIT_S) -> list[int]:
        """Exit codes of all ranks."""
        end = time.monotonic() + limit_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in late:
            self.signal(rank, signal.SIGKILL)
            self.processes[rank].join()
        assert not late, f"ranks {late} were still running after {limit_s} s\n{self.logs()}"
        return [process.exitcode or 0 for process in self.processes]

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + _LIMIT_S
        while not any(line["step"] >= step for line in read_metrics(self.folder.metrics_file)):
            assert time.monotonic() < end, self.logs()
            assert all(process.exitcode is None for process in self.processes), self.logs()
            time.sleep(0.02)

    def logs(self) -> str:
        texts = ((rank, self.folder.path / f"rank{rank}.log") for rank in range(self.world))
        return "\n".join(f"rank {rank}:\n{path.read_text()}" for rank, path in texts if path.exists())


def run_to_end(path: Path, plan: galvatron.Plan, settings: Settings) -> list[dict[str, Any]]:
    """Train in order; the metrics of all steps."""
    job = Job(begin(path, plan, settings), plan.cluster.devices).start()
    assert job.wait() == [0] * plan.cluster.devices, job.logs()
    return read_metrics(job.folder.metrics_file)
