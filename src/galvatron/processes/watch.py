"""Each rank's watch: a thread that tells the others it lives, and ends the process when the job cannot go on.

The first rank of each host, and rank 1, look after all. A rank that has died or hangs is found by them, named in the
store that all ranks share, and whoever reads that stops at once, also while it waits in a collective for ever. A second
thread sees to it that the first is answered: where the machine with the store is lost, nothing is said any more.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from galvatron.core.errors import RankFailure
from galvatron.processes.heartbeats import Heartbeat, LastSeen, describe, judge, this_machine, where_am_i
from galvatron.processes.stopping import StopRequest

__all__ = ["Watch", "Watched"]

_OVER = "galvatron/over"
"""Says why the job is over, once somebody knows."""
_GRACE_S = 1.0
"""Between learning that the job is over and ending this process: its own error may be about to be shown."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The rank that a watch speaks for."""

    rank: int
    stages: Sequence[int]
    """Of each rank."""
    memory_bytes: Callable[[], int]
    """What the rank's device holds now."""


class Watch:
    """Runs from :meth:`start` to :meth:`done`."""

    def __init__(
        self,
        watched: Watched,
        *,
        store: Any,
        stop: StopRequest,
        timeout_s: float,
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        """``store``: a connection of the watch's own; ``record``: keeps what went wrong."""
        self._rank, self._stages, self._memory_bytes = watched.rank, watched.stages, watched.memory_bytes
        self._store, self._stop, self._timeout_s, self._record = store, stop, timeout_s, record
        self._silence_s = timeout_s
        self._host, self._machine, self._pid = socket.gethostname(), this_machine(), os.getpid()
        self._step, self._phase, self._number = 0, "starting", 0
        self._last_seen: dict[int, LastSeen] = {}
        self._observes = self._rank == 1 or int(os.environ.get("LOCAL_RANK", self._rank)) == 0
        self._interval_s = min(1.0, timeout_s / 10)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._unanswered_s = 0.0
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._send_heartbeat()
        self._thread.start()
        threading.Thread(target=self._see_to_answers, name="answers", daemon=True).start()

    def at(self, step: int, phase: str) -> None:
        """Where training is. A new step is said at once, so that a rank that dies is named with its own."""
        new = step != self._step
        self._step, self._phase = step, phase
        if new:
            with suppress(Exception):  # the thread finds out what is the matter
                self._send_heartbeat()

    def done(self) -> None:
        """The rank ends in order; whoever looks must not miss it."""
        self._phase = "done"
        self._ended.set()
        self._thread.join()
        with suppress(Exception):
            self._send_heartbeat()

    def fail(self, message: str, step: int) -> None:
        """The rank ends with an error of its own: the others stop, and its own words stay."""
        self._ended.set()
        with suppress(Exception):
            self._claim(message, [self._rank], step)

    def wait_for_the_end(self, seconds: float) -> None:
        """For a rank that was cut off and does not know by whom: the thread ends the process if it learns more.

        Broken connections and no sign of life: it does not take the whole timeout to see that such a rank is lost.
        """
        self._silence_s = min(self._timeout_s, seconds / 2)
        self._observes = True
        self._thread.join(seconds)

    def heartbeats(self) -> list[Heartbeat]:
        """The last sign of each rank."""
        try:
            keys = [_key(rank) for rank in range(len(self._stages))]
            return [Heartbeat.decode(text) for text in self._store.multi_get(keys)]
        except Exception:  # the store is gone, or a rank has not said anything yet
            return []

    # The thread

    def _run(self) -> None:
        while not self._ended.is_set():
            self._stop.wait(self._interval_s)
            try:
                self._send_heartbeat()
                if self._store.check([_OVER]):
                    self._end(None)
                if self._observes:
                    self._observe()
                self._unanswered_s = 0.0
            except Exception:  # the store is gone, and with it the job
                if not self._ended.is_set():
                    self._end_without_store("its connection broke")

    def _see_to_answers(self) -> None:
        """Counts its own turns: the clock's seconds also go by while the process is stopped, and nobody is asked."""
        while not self._ended.wait(self._interval_s):
            self._unanswered_s += self._interval_s
            if self._unanswered_s > self._timeout_s:
                self._end_without_store(f"it has given no answer for {self._timeout_s:g} s")

    def _end_without_store(self, why: str) -> None:
        """On another machine than the store's: that machine is lost. On the same: the launcher is, and nobody reads."""
        first = self._last_seen.get(0)
        if first is None or first.heartbeat.machine == self._machine:
            self._end(None)
            return
        lost = sorted(
            rank for rank, each in self._last_seen.items() if each.heartbeat.machine == first.heartbeat.machine
        )
        step = first.heartbeat.step
        message = f"{first.heartbeat.host} with ranks {', '.join(map(str, lost))} is lost (at step {step}): {why}"
        self._record({"message": message, "ranks": lost, "stage": first.heartbeat.stage, "step": step})
        self._end(message)

    def _send_heartbeat(self) -> None:
        with self._lock:
            self._number += 1
            self._store.set(_key(self._rank), self._sign().encode())

    def _sign(self) -> Heartbeat:
        where, waiting = where_am_i()
        return Heartbeat(
            rank=self._rank,
            stage=self._stages[self._rank],
            host=self._host,
            machine=self._machine,
            pid=self._pid,
            number=self._number,
            step=self._step,
            phase=self._phase,
            where=where,
            waiting=waiting,
            memory_bytes=self._memory_bytes(),
        )

    def _observe(self) -> None:
        now = time.monotonic()
        present = [rank for rank in range(len(self._stages)) if self._store.check([_key(rank)])]
        for rank, text in zip(present, self._store.multi_get([_key(rank) for rank in present]), strict=True):
            heartbeat = Heartbeat.decode(text)
            self._last_seen.setdefault(rank, LastSeen(heartbeat, now, now)).see(heartbeat, now)
        gone = [each.heartbeat for each in self._last_seen.values() if self._is_gone(each.heartbeat)]
        if gone:
            self._conclude(f"{describe(gone[0])} died", [heartbeat.rank for heartbeat in gone])
            return
        if len(self._last_seen) == len(self._stages):
            seen = [self._last_seen[rank] for rank in sorted(self._last_seen)]
            verdict = judge(seen, now, self._timeout_s, self._silence_s)
            if verdict is not None:
                self._conclude(verdict.message, list(verdict.ranks))

    def _is_gone(self, heartbeat: Heartbeat) -> bool:
        """Whether a process of this machine does not exist any more and did not say that it was done."""
        if heartbeat.machine != self._machine or heartbeat.phase == "done" or heartbeat.rank == self._rank:
            return False
        try:
            os.kill(heartbeat.pid, 0)
        except ProcessLookupError:
            return Heartbeat.decode(self._store.get(_key(heartbeat.rank))).phase != "done"
        except PermissionError:
            return False
        return False

    def _conclude(self, message: str, ranks: Sequence[int]) -> None:
        """The first to know says so, and everybody stops. Stopped processes do not end by themselves."""
        first = self._claim(message, ranks, self._last_seen[ranks[0]].heartbeat.step)
        for rank in ranks:
            heartbeat = self._last_seen[rank].heartbeat
            if heartbeat.machine == self._machine and rank != self._rank:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(heartbeat.pid, signal.SIGKILL)
        self._end(message if first else None)

    def _claim(self, message: str, ranks: Sequence[int], step: int) -> bool:
        """Say why the job is over, unless somebody has said so already."""
        first: bool = self._store.compare_set(_OVER, "", message).decode() == message
        if first:
            stage = self._stages[ranks[0]]
            self._record({"message": message, "ranks": list(ranks), "stage": stage, "step": step})
        return first

    def _end(self, message: str | None) -> None:
        if self._ended.wait(_GRACE_S):
            return
        if message is not None:
            print(f"error: {message}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(RankFailure.exit_status)


def _key(rank: int) -> str:
    return f"galvatron/heartbeat/{rank}"
