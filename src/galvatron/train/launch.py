"""Starts a run's processes on this machine through torchrun's elastic agent, and says how they ended.

The agent starts and stops them; who is to blame for a failure is found by the ranks' own watch, which leaves word in
the run's folder. Requests to stop are passed on to the ranks, which save and end in order; those that have not met yet
have nothing to save and end at once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from galvatron.core.errors import RankFailure
from galvatron.processes.environment import LAUNCHER, defaults_if_unset
from galvatron.train.run_folder import RunFolder

__all__ = ["Ended", "launch"]

_ENDING = (signal.SIGHUP, signal.SIGQUIT)
"""What the agent handles itself once it has started the ranks: it ends them."""
_LOOK_S = 0.1
"""Between two looks for processes that have started since a request to stop."""
_LOOKS_AT_STARTING = 20
"""At a process that is being started, in that time."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the processes ended."""

    status: int
    """0, or the exit status of the rank that failed first; 128 and a signal's number where that ended the run."""
    message: str = ""
    ranks: tuple[int, ...] = ()
    """Those to blame."""

    @property
    def may_try_again(self) -> bool:
        """Whether it was the machine's fault, as far as one can tell, and not that of what was asked for."""
        return self.status in (1, RankFailure.exit_status)


def launch(folder: RunFolder, processes: int, say: Callable[[str], None]) -> Ended:
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
        signals_to_handle=",".join(number.name for number in _heeded()),
    )
    with _nobody_left(), _environment(processes), _signals_passed_on() as request:
        say(f"starting {processes} process{'es' * (processes > 1)}")  # a signal is answered from here on
        try:
            launch_agent(config, sys.executable, ["-u", "-m", "galvatron.train", str(folder.path)])
        except ChildFailedError as error:
            return _ended(folder, error, request.number)
        except SignalException as error:
            number = signal.Signals(error.sigval)
            return Ended(128 + number, f"{number.name} ended the run at once; go on from its last save with --resume")
    return Ended(0)


@contextmanager
def _environment(processes: int) -> Iterator[None]:
    """What ranks should find set, unless the user has set it."""
    added = {
        LAUNCHER: str(os.getpid()),
        **defaults_if_unset(
            OMP_NUM_THREADS=str(max(1, len(os.sched_getaffinity(0)) // processes)),
            KINETO_LOG_LEVEL="99",  # the profiler, which counts memory on CPUs, would announce itself
        ),
    }
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


class _PassedOn:
    """A request to stop on its way to the ranks. Made and called in the main thread."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        """The first one that came."""
        self._over = threading.Event()

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Ranks may still be coming: each is told when it is there."""
        first, self.number = self.number is None, self.number or signal.Signals(number)
        if first:
            threading.Thread(target=self._tell, name="stop", daemon=True).start()

    def _tell(self) -> None:
        told: set[int] = set()
        while not self._over.is_set():
            for child in set(_children()) - told:
                told.add(child)
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGTERM)
            self._over.wait(_LOOK_S)

    def over(self) -> None:
        self._over.set()


def _heeded() -> list[signal.Signals]:
    """Not those that whoever started us wants ignored, as nohup does."""
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def _end(number: int, frame: FrameType | None) -> None:
    """As the agent does it."""
    raise SignalException("ended by a signal", signal.Signals(number))


@contextmanager
def _signals_passed_on() -> Iterator[_PassedOn]:
    """SIGTERM and Ctrl-C go to the ranks, however often they come; the agent then sees them end in order."""
    request = _PassedOn()
    before = {number: signal.signal(number, request.hear) for number in (signal.SIGTERM, signal.SIGINT)}
    before |= {number: signal.signal(number, _end) for number in _heeded()}
    try:
        yield request
    finally:
        request.over()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _nobody_left() -> Iterator[None]:
    """A signal may come while the agent starts ranks: those of which it does not know yet it does not end either."""
    try:
        yield
    finally:
        mark = f"{LAUNCHER}={os.getpid()}".encode()
        for child in _children():
            with suppress(OSError):  # it has ended, or is not ours to look at
                if mark in _environ(child):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)


def _environ(child: int) -> list[bytes]:
    """Of another process. It is empty for a moment while a program is being started, after its files are closed."""
    for _ in range(_LOOKS_AT_STARTING):
        found = Path(f"/proc/{child}/environ").read_bytes()
        if found:
            return found.split(b"\0")
        time.sleep(_LOOK_S / _LOOKS_AT_STARTING)
    return []


def _children() -> list[int]:
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended meanwhile
            listed = Path(f"/proc/self/task/{thread}/children").read_text(encoding="ascii")
            found += map(int, listed.split())
    return found


def _ended(folder: RunFolder, error: ChildFailedError, asked: signal.Signals | None) -> Ended:
    """What the ranks said of the failure, or else what their exit codes say. ``asked``: a request to stop."""
    failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    if asked is not None and -signal.SIGTERM in failures.values():  # no rank that trains ends by it
        return Ended(
            128 + asked,
            f"{asked.name} came while processes were starting: they have ended, and no step was trained; start again, "
            "or go on with --resume",
        )
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
