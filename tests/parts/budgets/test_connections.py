"""Tests the relief of a port that is nearly full; tests/faults/test_idle_connections.py has a whole bus."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from tests.support.waiting import WAIT_SECONDS, within
from toolbus.bus.access.neighbours import Neighbours
from toolbus.parts.budgets import connections, room
from toolbus.parts.budgets.connections import QuietConnections
from toolbus.testing import running_bus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its kernel tells whose a connection is")

FULL = 12


class Port:
    """A port of this process and both ends of its connections."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def connect(self, text: bytes = b"") -> tuple[socket.socket, socket.socket]:
        """Returns the client's and the server's end of a new connection over which a client has sent a text."""
        client = self._stack.enter_context(socket.create_connection(self.server.getsockname(), WAIT_SECONDS))
        end, _ = self.server.accept()
        self._stack.enter_context(end)
        client.sendall(text)
        end.settimeout(WAIT_SECONDS)
        assert end.recv(100) == text if text else True
        return client, end


def ended(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return not client.recv(1)
    except BlockingIOError:
        return False


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setattr(connections, "share_of_descriptors", lambda share: FULL)
    monkeypatch.setattr(connections, "SILENT_SECONDS", -1.0)
    with contextlib.ExitStack() as stack:
        yield Port(stack)


def test_connections_that_said_nothing_are_ended_at_a_full_port_and_sessions_stay(port: Port) -> None:
    sessions = [port.connect(b"hello")[0] for _ in range(5)]
    silent = [port.connect()[0] for _ in range(FULL - 5)]
    limit = QuietConnections(Neighbours(["any"]), quiet_seconds=1000.0)
    limit.look()
    assert sum(map(ended, silent)) == FULL - FULL // 2  # a half of the port is free again
    assert not any(map(ended, sessions))
    assert list(limit.ended.values()) == [FULL - FULL // 2]


def test_a_port_that_is_not_full_keeps_all(port: Port) -> None:
    silent = [port.connect()[0] for _ in range(FULL - 1)]
    QuietConnections(Neighbours(["any"]), quiet_seconds=1000.0).look()
    assert not any(map(ended, silent))


def test_thousands_of_local_sessions_cost_no_look_at_each(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "share_of_descriptors", lambda share: 100_000)  # more than all others here have
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail(f"reads {path}"))
    QuietConnections(Neighbours(["any"]), quiet_seconds=1000.0).look()
    for _ in range(FULL):
        port.connect()
    assert FULL < connections._tcp_sockets() < 100_000


def test_connections_that_this_process_made_stay(port: Port) -> None:
    clients = [port.connect()[0] for _ in range(FULL)]
    port.server.close()  # as if another process served them
    QuietConnections(Neighbours(["any"]), quiet_seconds=1000.0).look()
    assert not any(map(ended, clients))


def test_the_peer_with_the_most_idle_connections_makes_room(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [port.connect()[0] for _ in range(4)]
    many = [port.connect()[0] for _ in range(FULL)]
    own = {client.getsockname()[1] for client in few}
    monkeypatch.setattr(
        QuietConnections, "_peer", lambda self, other, *_: ("few", True) if other[1] in own else ("many", True)
    )
    limit = QuietConnections(Neighbours(["any"]), quiet_seconds=1000.0)
    limit.look()
    assert not any(map(ended, few))
    assert limit.ended == {"many": sum(map(ended, many))} == {"many": len(few) + FULL - FULL // 2}


def test_who_may_not_use_the_bus_gets_no_time_to_be_quiet(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = [port.connect(b"hello")[0] for _ in range(FULL)]
    monkeypatch.setattr(QuietConnections, "_peer", lambda self, *_: ("a stranger", False))
    QuietConnections(Neighbours(["any"]), quiet_seconds=1000.0).look()
    assert sum(map(ended, refused)) == FULL - FULL // 2


def test_looks_leave_no_descriptors(port: Port) -> None:
    for _ in range(FULL):
        port.connect(b"hello")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        QuietConnections(Neighbours(["any"]), quiet_seconds=1000.0).look()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_peers_are_users_here_and_addresses_elsewhere() -> None:
    limit = QuietConnections(Neighbours(["self"]), quiet_seconds=1.0)
    own = ("203.0.113.1", 48931)
    assert limit._peer(("192.0.2.7", 5), own, None) == ("192.0.2.7", True)
    assert limit._peer(("::ffff:192.0.2.7", 5), own, None) == ("192.0.2.7", True)
    assert limit._peer(("2001:db8:1:2:3::4", 5), own, None) == ("2001:db8:1:2::/64", True)
    assert limit._peer(("127.0.0.1", 5), ("127.0.0.1", 6), None) == ("programs that have ended", False)


def test_a_descriptor_that_is_another_file_by_now_is_left_alone(port: Port) -> None:
    clients = [port.connect() for _ in range(FULL)]
    limit = QuietConnections(Neighbours(["any"]), quiet_seconds=1000.0)
    held = list(limit._accepted())
    assert len(held) == FULL
    first, other = clients[0][0], clients[1]
    wrong = next(each for each in held if each.other == first.getsockname())
    os.dup2(other[1].fileno(), wrong.descriptor)
    assert not connections._end(wrong)
    assert not ended(other[0])


async def test_a_bus_that_could_not_look_at_its_connections_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, again = 0, asyncio.Event()
    loop = asyncio.get_running_loop()

    def look(_: QuietConnections) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError(errno.EMFILE, "no descriptor is free")
        loop.call_soon_threadsafe(again.set)

    monkeypatch.setattr(QuietConnections, "look", look)
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.0)
    async with running_bus():
        await within(again.wait())
