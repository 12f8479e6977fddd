"""When a rank fails: its own error is what people see first, and the others stop at once.

A failing rank leaves its error in the store that the ranks rendezvous through before it ends. The others then fail
too, usually because a connection broke; they look there, and say whose error it was instead of printing their own. What
every rank finds wrong by itself (a plan that does not fit the model) is printed once, by rank 0, without a traceback.
Before the ranks have met, each prints its own.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch.distributed as dist

from galvatron.core.errors import GalvatronError

__all__ = ["is_symptom", "report_failures", "report_input"]

_KEY = "galvatron/failure"
_SAID = "galvatron/said"
_GRACE_S = 2.0
"""How long a rank waits for another one to say what is wrong."""
_ALONE = (
    "\nA rank that this one waited for has ended. If it says no reason of its own, it had fewer batches (give all "
    "ranks the same number), or was killed, as the system does where memory runs out."
)
_SYMPTOMS = ("connection", "broken pipe", "reset by peer", "socket", "nccl", "gloo", "timed out", "aborted")
"""Words in errors of ranks that are merely cut off from one that failed."""


def report_failures() -> None:
    """Let errors that end this process be reported that way."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(dist.get_rank(), dist.distributed_c10d._get_default_store())


def report_input() -> None:
    """Let what is wrong with the input be said without a traceback, before the ranks have met."""
    if sys.excepthook is sys.__excepthook__ and not _at_prompt():
        sys.excepthook = _say_input


def _say_input(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, GalvatronError):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
    sys.stdout.flush()
    os._exit(error.exit_status)


def _at_prompt() -> bool:
    return bool(sys.flags.interactive or sys.flags.inspect or hasattr(sys, "ps1"))


class _Hook:
    """Takes the place of ``sys.excepthook``."""

    def __init__(self, rank: int, store: Any) -> None:
        self._rank, self._store = rank, store
        self._otherwise = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, GalvatronError):
            self._report_input(error)
        elif issubclass(kind, Exception):
            self._report(kind, error, trace)
        else:
            self._otherwise(kind, error, trace)

    def _report_input(self, error: GalvatronError) -> None:
        """Rank 0 speaks for all; another rank speaks if rank 0 found nothing wrong."""
        if self._rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
            with suppress(Exception):
                self._store.set(_SAID, "")
        elif not self._appears(_SAID):
            print(f"error on rank {self._rank}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        self._end(error.exit_status)

    def _appears(self, key: str) -> bool:
        """Whether another rank sets a key, now or soon; also if the store is gone, and rank 0 with it."""
        end = time.monotonic() + _GRACE_S
        try:
            while time.monotonic() < end:
                if self._store.check([key]):
                    return True
                time.sleep(0.05)
        except Exception:
            return True
        return False

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
        first = self._first_failure(text, symptom=is_symptom(error))
        if first.startswith(f"rank {self._rank} "):
            alone = _ALONE if isinstance(error, dist.DistError) or re.search("gloo|nccl", str(error).lower()) else ""
            print(first + alone, file=sys.stderr, flush=True)  # noqa: T201
        else:
            said = first.splitlines()
            summary = said[0] if len(said) == 1 else f"{said[0]} {said[-1]}"
            print(f"rank {self._rank} stopped because {summary}", file=sys.stderr, flush=True)  # noqa: T201
        self._end(1)

    def _first_failure(self, text: str, *, symptom: bool) -> str:
        """What the first rank that failed has to say: this one, unless another was there before."""
        mine = f"rank {self._rank} failed:\n{text}"
        try:
            if symptom:
                self._appears(_KEY)
            found: bytes = self._store.compare_set(_KEY, "", mine)
        except Exception:  # the store went with rank 0
            return mine
        first = found.decode(errors="replace")
        return mine if first.startswith(f"rank {self._rank} ") else first  # at a prompt it may have failed before

    def _end(self, status: int) -> None:
        """End without waiting for collectives that will never complete, unless somebody sits at a prompt."""
        sys.stderr.flush()
        sys.stdout.flush()
        if _at_prompt():
            return
        os._exit(status)


def is_symptom(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, dist.DistError | ConnectionError) or any(word in text for word in _SYMPTOMS)
