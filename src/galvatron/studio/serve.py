"""Serves the studio on the loopback interface until it is interrupted."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable

from galvatron.core.errors import InvalidInput

__all__ = ["HOST", "serve"]

HOST = "127.0.0.1"
"""The only address that is served: other machines cannot reach it."""


def serve(port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted; ``port`` 0: a free one. ``ready`` is told the address."""
    try:
        import uvicorn

        from galvatron.studio.app import studio
    except ImportError as error:
        raise InvalidInput(
            f"studio: {error.name or error} is not installed; install galvatron[studio], or use 'galvatron plan'"
        ) from None
    # In an empty folder no text of a page can be the name of a file beside it.
    with _listening(port) as listening, tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        os.environ["HF_HUB_OFFLINE"] = "1"  # a configuration that names something of the hub gets nothing
        own = int(listening.getsockname()[1])
        config = uvicorn.Config(
            studio(own), log_level="warning", access_log=False, ws="none", server_header=False,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        ready(f"http://{HOST}:{own}/")
        uvicorn.Server(config).run(sockets=[listening])


def _listening(port: int) -> socket.socket:
    try:
        if not 0 <= port < 2**16:
            raise OSError(None, "expected 0 to 65535")
        return socket.create_server((HOST, port))
    except OSError as error:
        raise InvalidInput(f"port: {port} cannot be used ({error.strerror}); give another one, or 0 for any") from None
