"""Real connections through loopback are paced as they should be."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from galvatron.processes.pacing import _MAX_PACING_RATE, pace_connections, pace_new

RATE = 64_000_000


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        yield sender, receiver


def rate_of(connection: socket.socket) -> int:
    return int(struct.unpack("@L", connection.getsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, 8))[0])


def test_a_paced_connection_is_no_faster(pair: tuple[socket.socket, socket.socket]) -> None:
    """Half a second's worth at this rate, which loopback else takes in some milliseconds."""
    sender, receiver = pair
    pace_new(RATE)
    amount = RATE // 2
    started = time.perf_counter()
    sending = threading.Thread(target=sender.sendall, args=(bytes(amount),))
    sending.start()
    received = 0
    while received < amount:
        received += len(receiver.recv(1 << 20))
    sending.join()
    assert time.perf_counter() - started > 0.3


def test_connections_of_others_stay_open(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    pace_new(RATE)
    sender.sendall(b"still here")
    assert receiver.recv(100) == b"still here"
    assert sender.gettimeout() is None


def test_known_ones_are_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    known = pace_new(RATE)
    sender, _ = pair
    sender.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, struct.pack("@L", 2 * RATE))
    pace_new(RATE, known)
    assert rate_of(sender) == 2 * RATE


def test_other_sockets_are_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        before = rate_of(datagrams)
        pace_new(RATE)
        assert rate_of(datagrams) == before
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_later_connections_are_found(request: pytest.FixtureRequest) -> None:
    pace_connections(RATE)
    sender, _ = request.getfixturevalue("pair")
    deadline = time.monotonic() + 10
    while rate_of(sender) != RATE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rate_of(sender) == RATE
