"""Links of a set speed between processes of one machine: the system paces what each TCP connection sends.

How fast messages get from process to process through loopback depends on which cores happen to be free, and varies by
a fifth from one run to the next. Held to a rate that the cores can always keep up with, they take the same time again
and again. Linux alone; needs no rights.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import suppress

__all__ = ["pace_connections", "pace_new"]

Connections = frozenset[tuple[int, str]]
"""Open sockets of this process: the number of the file, and which socket that is."""
_MAX_PACING_RATE = 47
"""SO_MAX_PACING_RATE of Linux, for which Python has no name."""
_EVERY_S = 0.2


def pace_connections(bytes_per_s: int) -> None:
    """From now on let every TCP connection of this process send no faster, those made later (by libraries, too) soon
    after they are made."""
    threading.Thread(target=_pace_for_ever, args=(bytes_per_s,), name="galvatron-pace", daemon=True).start()


def _pace_for_ever(bytes_per_s: int) -> None:
    known: Connections = frozenset()
    while True:
        known = pace_new(bytes_per_s, known)
        time.sleep(_EVERY_S)


def pace_new(bytes_per_s: int, known: Connections = frozenset()) -> Connections:
    """Pace all connections but those known already; returns all that there are."""
    there = _sockets()
    for number, _ in there - known:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:  # it may be closed by now
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("@L", bytes_per_s))
    return there


def _sockets() -> Connections:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add((int(name), target))
    return frozenset(found)
