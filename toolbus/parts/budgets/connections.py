"""Ends connections that say nothing when they are about to fill an address of the bus, those of its largest peer first.

A connection takes a descriptor before anybody knows whose it is, and grpcio shows none before its first RPC. So the
sockets of this process are asked: whose each is, and when it last carried anything. A peer is a user of this machine,
or an address elsewhere (of IPv6 its first 64 bits, which are a network of its own).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolbus.bus.access.neighbours import Neighbours
from toolbus.common.descriptors import share_of_descriptors
from toolbus.common.local_users import Address, kernel_socket, owner_of, show_user
from toolbus.common.newest import NewestCache

log = logging.getLogger("toolbus.budgets")

FULL_SHARE = 0.22  # of the descriptors; HTTP takes no more from 0.25 on, gRPC from 0.5 on
MAX_PEERS = 1_000  # whose ended connections are counted
SILENT_SECONDS = 1.0  # since a connection was made or used, by whom nothing is known or who may not use the bus
_TIMES = struct.Struct("=L4xL")  # last_data_sent, last_data_recv in ms
_TIMES_AT, _RECEIVED_AT, _INFO_BYTES = 44, 128, 136  # in struct tcp_info, of Linux since 4.1
_RECEIVED = struct.Struct("=Q")


@dataclass(frozen=True, slots=True)
class AcceptedConnection:
    """One accepted connection.

    Attributes:
        descriptor: of this process; another file may have it by now.
        own, other: its ends.
        peer: whose it is.
        may_call: whether this peer may use the bus, as far as that is known.
        quiet_seconds: since anything was sent or received.
        spoke: whether anything was received at all.
    """

    descriptor: int
    own: Address
    other: Address
    peer: str
    may_call: bool
    quiet_seconds: float
    spoke: bool


class QuietConnections:
    """The connections that this process has accepted.

    Args:
        quiet_seconds: after which a connection that has spoken carries no session: these have heartbeats.
    """

    def __init__(self, neighbours: Neighbours, quiet_seconds: float) -> None:
        self.ended: NewestCache[str, int] = NewestCache(MAX_PEERS)  # by peer
        self._neighbours, self._quiet_seconds = neighbours, quiet_seconds

    def look(self) -> None:
        """Ends connections at each port that is nearly full; takes 10 µs a descriptor where that may be so."""
        full = share_of_descriptors(FULL_SHARE)
        if sys.platform != "linux" or _tcp_sockets() < full or len(os.listdir("/proc/self/fd")) < full:
            return
        by_port: dict[int, list[AcceptedConnection]] = {}
        for held in self._accepted():
            by_port.setdefault(held.own[1], []).append(held)
        for port, connections in by_port.items():
            if len(connections) >= full:
                self._relieve(port, connections, full)

    def _relieve(self, port: int, connections: list[AcceptedConnection], full: int) -> None:
        """Leaves the largest peers half of a port at most, as far as their connections are idle."""
        by_peer: dict[str, list[AcceptedConnection]] = {}
        for held in connections:
            by_peer.setdefault(held.peer, []).append(held)
        peer = max(by_peer, key=lambda each: sum(map(self._idle, by_peer[each])))
        idle = sorted(filter(self._idle, by_peer[peer]), key=lambda held: (held.spoke, -held.quiet_seconds))
        ended = sum(_end(held) for held in idle[: max(0, len(connections) - full // 2)])
        if ended:
            self.ended[peer] = self.ended.get(peer, 0) + ended
            log.warning(
                "port %d has %d connections, %d of them of %s: ended %d of these that said nothing, since the port "
                "takes no more soon",
                port,
                len(connections),
                len(by_peer[peer]),
                peer,
                ended,
            )

    def _idle(self, held: AcceptedConnection) -> bool:
        return held.quiet_seconds > (self._quiet_seconds if held.spoke and held.may_call else SILENT_SECONDS)

    def _accepted(self) -> Iterator[AcceptedConnection]:
        """Yields the connections to ports at which this process listens."""
        ports: set[int] = set()
        connected: list[tuple[int, Address, Address, bytes]] = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), _borrowed(int(name)) as each:
                if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
                    continue
                own = each.getsockname()[:2]
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.add(own[1])
                    continue
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                if len(info) == _INFO_BYTES:
                    connected.append((int(name), own, each.getpeername()[:2], info))
        kernel = kernel_socket()
        with kernel or contextlib.nullcontext():
            for descriptor, own, other, info in connected:
                if own[1] in ports:
                    peer, may_call = self._peer(other, own, kernel)
                    quiet = min(_TIMES.unpack_from(info, _TIMES_AT)) / 1000
                    spoke = bool(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0])
                    yield AcceptedConnection(descriptor, own, other, peer, may_call, quiet, spoke)

    def _peer(self, other: Address, own: Address, kernel: socket.socket | None) -> tuple[str, bool]:
        """Returns whose a connection is, and whether that peer may use the bus."""
        address = ipaddress.ip_address(other[0].partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        if not address.is_loopback:
            network = address if address.version == 4 else ipaddress.ip_network((address, 64), strict=False)
            return str(network), True
        uid = owner_of(other, own, kernel)
        return "programs that have ended" if uid is None else show_user(uid), self._neighbours.allows(uid)


def _tcp_sockets() -> int:
    """Returns how many TCP sockets there are, also of others: thousands of sessions on the lane fill no port."""
    found = list[str]()
    for name in ("sockstat", "sockstat6"):
        with contextlib.suppress(OSError):
            found += re.findall(r"^TCP6?: inuse (\d+)", Path(f"/proc/self/net/{name}").read_text(), re.MULTILINE)
    return sum(map(int, found)) if found else sys.maxsize


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Lends the socket of a descriptor; raises `OSError` where it has none.

    The copy stays the same socket, whatever its owner does meanwhile.
    """
    copied = os.dup(descriptor)
    try:
        copy = socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise
    with copy:
        yield copy


def _end(held: AcceptedConnection) -> bool:
    """Ends a connection, unless its descriptor has become that of another one."""
    with contextlib.suppress(OSError), _borrowed(held.descriptor) as each:
        if (each.getsockname()[:2], each.getpeername()[:2]) == (held.own, held.other):
            each.shutdown(socket.SHUT_RDWR)
            return True
    return False
