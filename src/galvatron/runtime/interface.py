"""Which network gloo takes: by itself that of the host's name, which on many systems means the machine itself."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress

__all__ = ["choose_interface", "interface_of"]

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""


def choose_interface() -> None:
    """Where the job has several machines and the host's name leads nowhere else, take the interface towards the machine
    through which the ranks meet, unless the user has said which."""
    several = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    if _VARIABLE in os.environ or not several or not _stays_here(socket.gethostname()):
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        name = interface_of(towards.getsockname()[0])
        if name is not None:
            os.environ[_VARIABLE] = name


def _stays_here(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return True


def interface_of(address: str) -> str | None:
    """The interface with this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # interfaces without an address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
