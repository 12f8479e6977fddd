"""Who may ask: pages of this server, in small requests. Plain ASGI, so that nothing is read before it is allowed."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from galvatron.core.errors import InvalidInput

__all__ = ["MOST_BYTES", "Guard", "TooLarge"]

MOST_BYTES = 2**20
"""Of a request's body: the largest files that people upload, such as a configuration, have some ten thousand."""
_SECURITY = (
    ("content-security-policy",
     "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
     "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
)  # fmt: skip
"""A page loads nothing from elsewhere, sends nothing elsewhere, and stands in nobody's frame."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class TooLarge(InvalidInput):
    """A request's body is larger than :data:`MOST_BYTES`."""


class Guard:
    """Lets through what pages of this server ask, and refuses the rest before it is read.

    The host is checked, so that no other name can be made to mean this machine (DNS rebinding); so is the origin of
    everything that asks for work, which a browser sends along and a page of another server cannot change.
    """

    def __init__(self, app: Application, port: int) -> None:
        self._app = app
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise InvalidInput(f"studio: a connection of type {scope['type']!r}; expected http")
        status, problem = self._problem(scope)
        if problem:
            await _refuse(send, status, problem)
            return
        await self._app(scope, _counted(receive), _with_headers(send))

    def _problem(self, scope: Message) -> tuple[int, str]:
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = headers.get(b"host", b"").decode("latin-1")
        if host not in self._hosts:
            return 403, f"host {host!r} is not this server; expected {' or '.join(sorted(self._hosts))}"
        if scope["method"] in ("GET", "HEAD"):
            return 200, ""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin.removeprefix("http://") not in self._hosts or not origin.startswith("http://"):
            return 403, f"origin {origin!r} may not ask; expected this server's own page"
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            return 415, "expected a body of type application/json"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            return 413, _too_large(length.decode("latin-1"))
        return 200, ""


def _too_large(length: str) -> str:
    return f"the request has {length} bytes; expected at most {MOST_BYTES}"


def _counted(receive: Receive) -> Receive:
    """Also what comes in pieces, without a length, is refused once it is too much."""
    seen = 0

    async def counting() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MOST_BYTES:
            raise TooLarge(_too_large(f"{seen} or more"))
        return message

    return counting


def _encoded(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_encoded(_SECURITY)]}
        await send(message)

    return sending


async def _refuse(send: Send, status: int, problem: str) -> None:
    body = json.dumps({"error": problem}).encode()
    headers = _encoded((("content-type", "application/json"), ("content-length", str(len(body))), *_SECURITY))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
