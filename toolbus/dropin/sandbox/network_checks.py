"""Checks the audit events about sockets: TCP connections to what is granted are allowed, everything else is denied.

Landlock knows ports but not addresses, and no protocol besides TCP; here both are checked. Checks are closures for the
reason that `file_checks` gives.
"""

from __future__ import annotations

import _socket
import socket
from collections.abc import Callable
from typing import Any

from toolbus.dropin.sandbox.file_checks import Allowed, Check, resolver

NETWORK_FIX = 'grant it in _manifest.json, under "connect" of this tool file\'s entry'


def network_checks(allowed: Allowed) -> dict[str, Check]:
    """Returns the checks of all events about sockets, by event."""
    connect = _connect_check(allowed)
    return {
        "socket.__new__": _new_check(),
        "socket.connect": connect,
        "socket.sendto": connect,
        "socket.sendmsg": connect,
        "socket.getaddrinfo": _name_check(allowed),
        "socket.gethostbyname": _name_check(allowed),
        "socket.gethostbyaddr": _name_check(allowed),
    }


def _new_check() -> Check:
    """Allows TCP sockets, and unix sockets: an event loop wakes itself over a pair of them."""
    show, stream, exact_type, number = ascii, int(socket.SOCK_STREAM), type, int
    inet = frozenset(map(int, (socket.AF_INET, socket.AF_INET6)))
    local = frozenset((-1, int(socket.AF_UNIX)))  # -1: taken from a descriptor that exists already
    tcp = frozenset((-1, 0, int(socket.IPPROTO_TCP)))
    names = {int(socket.SOCK_DGRAM): "a UDP socket", int(socket.SOCK_RAW): "a raw socket"}

    def check(args: tuple[Any, ...]) -> str:
        _, family, kind, protocol = args
        if exact_type(family) is not number or exact_type(kind) is not number or exact_type(protocol) is not number:
            return "the sandbox denies a socket whose family, type or protocol is not an int"
        if family in local or (family in inet and kind & 0xF == stream and protocol in tcp):
            return ""
        what = f"a socket of family {show(family)}, type {show(kind)}"
        if family in inet and kind & 0xF in names:
            what = names[kind & 0xF]
        return f"the sandbox denies {what}: tools may use TCP only, to what _manifest.json grants"

    return check


def _connect_check(allowed: Allowed) -> Check:
    kind, text, data, pair, number, show, length = type, str, bytes, tuple, int, ascii, len
    exact, unix, resolve, fix = frozenset(allowed.connect), allowed.unix, resolver(), NETWORK_FIX
    is_granted = _address_test(allowed)

    def check(args: tuple[Any, ...]) -> str:
        address = args[1]
        if address is None:  # the socket is connected already
            return ""
        if kind(address) is pair and length(address) >= 2:
            host, port = address[0], address[1]
            if kind(host) is text and kind(port) is number:
                if (host, port) in exact or is_granted(host, port):
                    return ""
                return f"the sandbox denies a connection to {show(host)} port {port}: {fix}"
        elif unix and (kind(address) is text or kind(address) is data) and resolve(address) == unix:
            return ""
        return "the sandbox denies a connection to anything but (host, port): pass a str and an int"

    return check


def _address_test(allowed: Allowed) -> Callable[[str, int], bool]:
    """Returns a function that tells whether an address is one of a granted host name, now or before."""
    grants, resolve_name, error, stream = allowed.connect, _socket.getaddrinfo, OSError, int(socket.SOCK_STREAM)
    known: set[tuple[object, int]] = set()
    numeric = _numeric_test()

    def is_granted(host: str, port: int) -> bool:
        if not numeric(host):
            return False
        if (host, port) in known:
            return True
        for name, granted in grants:
            if granted == port and not numeric(name):
                try:
                    addresses = resolve_name(name, port, 0, stream)
                except error:
                    continue
                for entry in addresses:
                    known.add((entry[4][0], port))
        return (host, port) in known

    return is_granted


def _numeric_test() -> Callable[[str], bool]:
    families, pton, errors = (int(socket.AF_INET), int(socket.AF_INET6)), _socket.inet_pton, (OSError, ValueError)

    def numeric(host: str) -> bool:
        for family in families:
            try:
                pton(family, host)
            except errors:
                continue
            return True
        return False

    return numeric


def _name_check(allowed: Allowed) -> Check:
    """Allows look-ups of granted names only, since a look-up sends the name out; numeric addresses are not sent."""
    kind, text, data, show, fix = type, str, bytes, ascii, NETWORK_FIX
    names, numeric = frozenset(host.lower() for host, _ in allowed.connect), _numeric_test()

    def check(args: tuple[Any, ...]) -> str:
        host = args[0]
        if host is None:
            return ""
        if kind(host) is data:
            host = host.decode("ascii", "replace")
        if kind(host) is text and (host.lower() in names or numeric(host)):
            return ""
        return f"the sandbox denies looking up {show(host) if kind(host) is text else 'a name'}: {fix}"

    return check
