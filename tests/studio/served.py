"""A real studio for tests: uvicorn on a free port of the loopback interface, in a thread."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

__all__ = ["Studio", "asked", "served_studio"]


@dataclass(frozen=True)
class Studio:
    """A server that runs."""

    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
        """Ask as the studio's own page would, but for headers that are given."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        usual = {"Origin": self.address, "Content-Type": "application/json"}
        return self.send(
            "POST", path, text, {**usual, **{name.replace("_", "-"): own for name, own in headers.items()}}
        )

    def send(self, method: str, path: str, body: bytes | Iterator[bytes], headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            chunked = not isinstance(body, bytes)
            connection.request(method, path, body, headers, encode_chunked=chunked)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def plan(self, model: Any, cluster: Any, **setup: Any) -> dict[str, Any]:
        """The answer to a question; presets by their names."""
        status, body = self.post("/plan", asked(model, cluster, **setup))
        assert status == 200, body
        answer: dict[str, Any] = json.loads(body)
        return answer


def asked(model: Any, cluster: Any, **setup: Any) -> dict[str, Any]:
    """A question as a page asks it."""
    named = [{"name": each} if isinstance(each, str) else each for each in (model, cluster)]
    return {"model": named[0], "cluster": named[1], "setup": setup}


@contextmanager
def served_studio() -> Iterator[Studio]:
    """The application behind a real server."""
    uvicorn = pytest.importorskip("uvicorn", reason="no server: pip install galvatron[studio]")
    pytest.importorskip("starlette", reason="no server: pip install galvatron[studio]")
    from galvatron.studio.app import studio

    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(studio(port), log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    try:
        yield Studio(port)
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
