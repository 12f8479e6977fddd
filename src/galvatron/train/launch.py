"""Starts a run's processes on this machine through torchrun's elastic agent, and says how they ended.

The agent starts and stops them; who is to blame for a failure is found by the ranks' own watch, which leaves word in
the run's folder. Requests to stop are passed on to the ranks, which save and end in order.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from galvatron.core.errors import RankFailure
from galvatron.processes.environment import defaults_if_unset
from galvatron.train.run_folder import RunFolder

__all__ = ["Ended", "launch"]

_OTHER_SIGNALS = "SIGHUP,SIGQUIT"
"""Those that the agent handles itself: it ends the ranks."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the processes ended."""

    status: int
    """0, or the exit status of the rank that failed first."""
    message: str = ""
    ranks: tuple[int, ...] = ()
    """Those to blame."""

    @property
    def may_try_again(self) -> bool:
        """Whether it was the machine's fault, as far as one can tell, and not that of what was asked for."""
        return self.status in (1, RankFailure.exit_status)


def launch(folder: RunFolder, processes: int) -> Ended:
    """Run ``python -m galvatron.train FOLDER`` in so many processes until all have ended."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it is said better, once, by us
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle=_OTHER_SIGNALS,
    )
    with _environment(processes), _signals_passed_on():
        try:
            launch_agent(config, sys.executable, ["-u", "-m", "galvatron.train", str(folder.path)])
        except ChildFailedError as error:
            return _ended(folder, error)
    return Ended(0)


@contextmanager
def _environment(processes: int) -> Iterator[None]:
    """What ranks should find set, unless the user has set it."""
    added = defaults_if_unset(
        OMP_NUM_THREADS=str(max(1, len(os.sched_getaffinity(0)) // processes)),
        KINETO_LOG_LEVEL="99",  # the profiler, which counts memory on CPUs, would announce itself
    )
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _signals_passed_on() -> Iterator[None]:
    """SIGTERM and Ctrl-C go to the ranks, however often they come; the agent then sees them end in order."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children() -> list[int]:
    listed = Path("/proc/self/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text(encoding="ascii").split()]


def _ended(folder: RunFolder, error: ChildFailedError) -> Ended:
    """What the ranks said of the failure, or else what their exit codes say."""
    failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    told: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        told = json.loads(folder.failure_file.read_text(encoding="utf-8"))
    own = [code for code in failures.values() if code > 1 and code != RankFailure.exit_status]
    status = own[0] if own else RankFailure.exit_status if told else 1
    if told:
        return Ended(status, told["message"], tuple(told.get("ranks", ())))
    first = {
        rank: code for rank, code in failures.items() if code != -signal.SIGTERM
    } or failures  # others the agent ended
    rank, code = next(iter(first.items()))
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return Ended(RankFailure.exit_status if code < 0 else status, f"rank {rank} {how}", tuple(first))
