"""Which network is taken between machines; that it then works is seen where there are two of them."""

from __future__ import annotations

import os
import socket

import pytest

from galvatron.processes.world import choose_interface, interface_of

_LOOPBACK = interface_of("127.0.0.1")


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines that meet at an address whose interface is known; the host's name means the machine itself."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.1.1")


def test_interfaces_are_found_by_their_addresses() -> None:
    assert _LOOPBACK in [name for _, name in socket.if_nameindex()]
    assert interface_of("192.0.2.1") is None  # an address for documents


def test_the_way_to_the_meeting_place_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_interface()
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == _LOOPBACK


@pytest.mark.parametrize("reason", ["the user has said which", "one machine", "the name is known outside"])
def test_else_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    if reason == "the user has said which":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    elif reason == "one machine":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    else:
        monkeypatch.setattr(socket, "gethostbyname", lambda host: "192.0.2.1")
    before = dict(os.environ)
    choose_interface()
    assert dict(os.environ) == before
