"""Tests whose a connection is, as the kernel says it: both ends, IPv4 and IPv6, the dead, and those who listen."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from toolbus.common.local_users import listener_id, listener_owner, owner_of, show_user

NOBODY = 65534

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _listener(opened: ExitStack, host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return opened.enter_context(socket.create_server((host, port), family=family, dualstack_ipv6=host == "::"))


def _connected(opened: ExitStack, listener: socket.socket, host: str, *, port: int = 0) -> socket.socket:
    client = opened.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    if port:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind((host, port))
    client.connect((host, listener.getsockname()[1]))
    return client


@pytest.mark.parametrize(
    ("listens_at", "host"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.5", "127.0.0.5"), ("::1", "::1"), ("::", "127.0.0.1")],
)
def test_the_owner_of_a_connection_is_found_by_its_addresses(opened: ExitStack, listens_at: str, host: str) -> None:
    listener = _listener(opened, listens_at)
    client = _connected(opened, listener, host)
    own, other = client.getsockname()[:2], client.getpeername()[:2]
    assert owner_of(own, other) == os.geteuid()
    assert owner_of(other, own) is None  # until it is accepted, no program has the other end
    opened.enter_context(listener.accept()[0])
    assert owner_of(other, own) == os.geteuid()


def test_the_owner_of_a_connection_over_mapped_addresses_is_found_in_either_spelling(opened: ExitStack) -> None:
    listener = _listener(opened, "::")
    client = _connected(opened, listener, "::ffff:127.0.0.1")
    port, to = client.getsockname()[1], listener.getsockname()[1]
    for host in ("127.0.0.1", "::ffff:127.0.0.1"):
        assert owner_of((host, port), (host, to)) == os.geteuid()


def test_a_socket_that_is_bound_to_the_loopback_interface_is_found(opened: ExitStack) -> None:
    listener = _listener(opened)
    client = opened.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
    client.connect(listener.getsockname())
    assert owner_of(client.getsockname(), client.getpeername()) == os.geteuid()


def test_a_connection_whose_program_has_closed_it_belongs_to_nobody_and_not_to_root(opened: ExitStack) -> None:
    listener = _listener(opened)
    client = _connected(opened, listener, "127.0.0.1")
    own, other = client.getsockname(), client.getpeername()
    client.sendall(b"POST /api/bus/drain HTTP/1.1\r\n\r\n")
    client.close()
    assert owner_of(own, other) is None
    with closing(listener.accept()[0]):
        assert owner_of(own, other) is None
    assert owner_of(own, other) is None  # closed at both ends: TIME_WAIT


def test_a_port_without_a_connection_belongs_to_nobody_even_where_a_program_listens_there(opened: ExitStack) -> None:
    listener = _listener(opened)
    assert owner_of(listener.getsockname(), ("127.0.0.1", 1)) is None
    assert owner_of(("127.0.0.1", 1), ("127.0.0.1", 2)) is None


def test_two_connections_from_one_port_have_an_owner_each(opened: ExitStack) -> None:
    first, second = _listener(opened), _listener(opened)
    own = _connected(opened, first, "127.0.0.1", port=_free_port())
    other = _connected(opened, second, "127.0.0.1", port=own.getsockname()[1])
    given_to = NOBODY if os.geteuid() == 0 else os.geteuid()  # only root gives a socket away
    os.fchown(other.fileno(), given_to, -1)
    assert own.getsockname() == other.getsockname()
    assert owner_of(own.getsockname(), first.getsockname()) == os.geteuid()
    assert owner_of(own.getsockname(), second.getsockname()) == given_to


def _free_port() -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(("listens_at", "host"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_the_owner_of_a_listener_is_found(opened: ExitStack, listens_at: str, host: str) -> None:
    listener = _listener(opened, listens_at)
    address = host, listener.getsockname()[1]
    assert listener_owner(address) == os.geteuid()
    listener.close()
    assert listener_owner(address) is None


@pytest.mark.parametrize("host", ["", "localhost", "::1%lo", "127.0.0.1\0", "[::1]"])
def test_what_is_not_an_address_has_no_owner(host: str) -> None:
    assert owner_of((host, 1), ("127.0.0.1", 2)) is None
    assert owner_of(("127.0.0.1", 70_000), ("127.0.0.1", 2)) is None


def test_users_are_shown_with_name_and_number() -> None:
    assert show_user(0) == "user root (uid 0)"
    assert show_user(2**31 + 17) == f"uid {2**31 + 17}"


@pytest.mark.parametrize(("listens_at", "reached_at"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::", "::1")])
def test_a_listening_socket_keeps_its_id_and_no_other_gets_it(
    opened: ExitStack, listens_at: str, reached_at: str
) -> None:
    first = _listener(opened, listens_at)
    address = (reached_at, first.getsockname()[1])
    known = listener_id(address)
    assert known
    _connected(opened, first, reached_at)
    duplicate = opened.enter_context(first.dup())  # as a program that restarts its workers keeps it
    first.close()
    assert listener_id(address) == known
    duplicate.close()
    assert listener_id(address) == ""
    _listener(opened, listens_at, address[1])
    assert listener_id(address) not in ("", known)


def test_a_port_where_nobody_listens_has_no_id(opened: ExitStack) -> None:
    bound = opened.enter_context(socket.socket())
    bound.bind(("127.0.0.1", 0))
    assert listener_id(bound.getsockname()) == ""
    assert listener_id(("no address", 1)) == ""
