"""What a rank says of itself while it trains, and what can be concluded from what all of them say. No clock of another
machine is compared with ours: a rank is as old as the time since *we* last saw its heartbeat change."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

__all__ = ["Heartbeat", "LastSeen", "Verdict", "describe", "judge", "this_machine", "where_am_i"]

_WAITING_IN = ("torch/distributed/", "galvatron/runtime/collectives.py", "galvatron/runtime/pipeline/transfer.py")
_WAITS_FOR_OTHERS = ("finish", "result")
"""Functions that wait for anything: their caller is named, which says what is waited for."""
_SAVING_IN = ("torch/distributed/checkpoint/", "galvatron/train/checkpoints/")
"""Where a rank works, though it was called from torch.distributed; it waits in the collectives inside."""
_UNTELLING = ("torch/distributed/c10d_logger.py", "galvatron/processes/heartbeats.py", "galvatron/processes/watch.py")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One rank's sign of life."""

    rank: int
    stage: int
    host: str
    """Its machine's name, for people."""
    machine: str
    """What tells machines apart whose processes are numbered separately (see :func:`this_machine`)."""
    pid: int
    number: int
    """Counts up while the process runs."""
    step: int
    phase: str
    """What the rank does in the step: data, forward and backward, optimizer, saving … or "done"."""
    where: str
    """The function its main thread is in."""
    waiting: bool
    """Whether that is a collective, so that it waits for others."""
    memory_bytes: int

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes | str) -> Heartbeat:
        return Heartbeat(**json.loads(text))


@dataclass(slots=True)
class LastSeen:
    """The last heartbeat of a rank, and when it changed, by our clock."""

    heartbeat: Heartbeat
    alive_at: float
    moved_at: float

    def see(self, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.number != self.heartbeat.number:
            self.alive_at = now
        if (heartbeat.step, heartbeat.phase) != (self.heartbeat.step, self.heartbeat.phase):
            self.moved_at = now
        self.heartbeat = heartbeat


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which ranks hold up the job."""

    ranks: tuple[int, ...]
    message: str


def judge(last_seen: Sequence[LastSeen], now: float, timeout_s: float, silence_s: float) -> Verdict | None:
    """Whether somebody hangs: a rank that gives no sign for ``silence_s``, or a job in which nobody has moved for
    ``timeout_s``.

    Nobody is blamed for waiting in a collective if somebody else is not. A run's first step is left out, as long as it
    takes (data are prepared, kernels chosen): ranks in step 0 need only be alive.
    """
    running = [seen for seen in last_seen if seen.heartbeat.phase != "done"]
    silent = [seen for seen in running if now - seen.alive_at > silence_s]
    if silent:
        return Verdict(
            _ranks(silent), f"{_named(silent)} given no sign of life for {silence_s:g} s{_others(running, silent)}"
        )
    training = [seen for seen in running if seen.heartbeat.step > 0]
    if not training or len(training) < len(last_seen) or any(now - each.moved_at <= timeout_s for each in training):
        return None
    busy = [seen for seen in training if not seen.heartbeat.waiting] or training
    return Verdict(_ranks(busy), f"{_named(busy)} not moved on for {timeout_s:g} s{_others(running, busy)}")


def _ranks(last_seen: Sequence[LastSeen]) -> tuple[int, ...]:
    return tuple(seen.heartbeat.rank for seen in last_seen)


def _named(last_seen: Sequence[LastSeen]) -> str:
    listed = "; ".join(describe(seen.heartbeat) for seen in last_seen[:4])
    more = f" and {len(last_seen) - 4} more" if len(last_seen) > 4 else ""
    return f"{listed}{more}: {'has' if len(last_seen) == 1 else 'have'}"


def describe(heartbeat: Heartbeat) -> str:
    """Which rank, and what it was doing."""
    process = f"process {heartbeat.pid} on {heartbeat.host}"
    doing = f"step {heartbeat.step}, {heartbeat.phase}, in {heartbeat.where}"
    return f"rank {heartbeat.rank} (stage {heartbeat.stage}, {process}, {doing})"


def _others(running: Sequence[LastSeen], blamed: Sequence[LastSeen]) -> str:
    places = {each.heartbeat.where for each in running if each not in blamed and each.heartbeat.waiting}
    return f"; others wait for it in {', '.join(sorted(places))}" if places else ""


def this_machine() -> str:
    """Equal for processes that can see each other by number: of one kernel and one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def where_am_i() -> tuple[str, bool]:
    """The function the main thread is in, and whether it waits for other ranks there.

    Backward on a GPU runs in a thread of its own, and so does writing, so all threads are asked; one that waits speaks
    for the process, else one that writes.
    """
    frames = sys._current_frames()
    # Not this function's own frame, which has ``frames``: both would keep each other, and all that functions of other
    # threads have at hand, such as logits, until the garbage collector comes.
    frames[threading.get_ident()] = sys._getframe(1)
    main = threading.main_thread().ident
    speaks = frames.get(main) if main is not None else None
    for thread, frame in frames.items():
        for each in _outwards(frame):
            if any(part in each.f_code.co_filename for part in _SAVING_IN):
                speaks = frame if thread != main else speaks
                break
            if any(part in each.f_code.co_filename for part in _WAITING_IN):
                callers = (who for who in _outwards(each) if who.f_code.co_name not in _WAITS_FOR_OTHERS)
                return next(callers, each).f_code.co_name, True
    innermost = next(_outwards(speaks), None)
    if innermost is None:
        return "nothing", False
    return f"{innermost.f_code.co_name} ({Path(innermost.f_code.co_filename).name}:{innermost.f_lineno})", False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if not any(part in frame.f_code.co_filename for part in _UNTELLING):
            yield frame
        frame = frame.f_back
