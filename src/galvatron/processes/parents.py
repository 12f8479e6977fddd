"""Processes that end when the one that started them does, however that happens. Linux only; elsewhere nothing is done.

Ranks of a run watch each other, but not before they have met: until then nobody would end them. Light: a rank calls it
before it imports anything that takes long.
"""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["end_with_parent", "outlive_parent"]

_PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that a process gets when its parent has ended."""


def end_with_parent(parent: int) -> None:
    """From now on. ``parent``: the number of the process that started this one, and may have ended already."""
    if not _on_its_end(signal.SIGKILL):
        return
    try:
        os.kill(parent, 0)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except PermissionError:
        pass  # it is there


def outlive_parent() -> None:
    """No longer."""
    _on_its_end(0)


def _on_its_end(number: int) -> bool:
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError):
        return False
    return bool(prctl(_PR_SET_PDEATHSIG, number) == 0)
