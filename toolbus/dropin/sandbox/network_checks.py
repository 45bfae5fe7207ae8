"""What the audit hook says about sockets: TCP to what is granted, and nothing else.

The kernel's sandbox knows ports but no addresses, and no protocol besides TCP; here both count. Checks are closures for
the reason that `file_checks` gives.
"""

from __future__ import annotations

import _socket
import socket
from collections.abc import Callable
from typing import Any

from toolbus.dropin.sandbox.file_checks import Allowed, Check, resolver

NETWORK_CURE = 'grant it in _manifest.json, under "connect" of this tool file\'s entry'


def network_checks(allowed: Allowed) -> dict[str, Check]:
    """Returns the checks of all events on sockets, by event."""
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
    """Sockets of this process among themselves are unix ones: an event loop wakes itself over a pair."""
    show, stream, exactly, number = ascii, int(socket.SOCK_STREAM), type, int
    inet = frozenset(map(int, (socket.AF_INET, socket.AF_INET6)))
    quiet = frozenset((-1, int(socket.AF_UNIX)))  # -1: the descriptor says it, so it was made before
    tcp = frozenset((-1, 0, int(socket.IPPROTO_TCP)))
    names = {int(socket.SOCK_DGRAM): "a UDP socket", int(socket.SOCK_RAW): "a raw socket"}

    def check(args: tuple[Any, ...]) -> str:
        _, family, kind, protocol = args
        if exactly(family) is not number or exactly(kind) is not number or exactly(protocol) is not number:
            return "the sandbox makes sockets from numbers only"
        if family in quiet or (family in inet and kind & 0xF == stream and protocol in tcp):
            return ""
        what = f"a socket of family {show(family)}, type {show(kind)}"
        if family in inet and kind & 0xF in names:
            what = names[kind & 0xF]
        return f"the sandbox refuses {what}: tools may use TCP only, to what _manifest.json grants"

    return check


def _connect_check(allowed: Allowed) -> Check:
    kind, text, data, pair, whole, show, least = type, str, bytes, tuple, int, ascii, len
    exact, unix, resolve, cure = frozenset(allowed.connect), allowed.unix, resolver(), NETWORK_CURE
    is_granted = _address_test(allowed)

    def check(args: tuple[Any, ...]) -> str:
        address = args[1]
        if address is None:  # it is connected already
            return ""
        if kind(address) is pair and least(address) >= 2:
            host, port = address[0], address[1]
            if kind(host) is text and kind(port) is whole:
                if (host, port) in exact or is_granted(host, port):
                    return ""
                return f"the sandbox refuses a connection to {show(host)} port {port}: {cure}"
        elif unix and (kind(address) is text or kind(address) is data) and resolve(address) == unix:
            return ""
        return "the sandbox refuses a connection to anything but (host, port): pass a str and an int"

    return check


def _address_test(allowed: Allowed) -> Callable[[str, int], bool]:
    """Returns whether an address is one that a granted name stands for now, or stood for before."""
    grants, look_up, error, stream = allowed.connect, _socket.getaddrinfo, OSError, int(socket.SOCK_STREAM)
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
                    found = look_up(name, port, 0, stream)
                except error:
                    continue
                for entry in found:
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
    """Asking for a name tells somebody the name: only granted ones, and addresses, which nobody is asked for."""
    kind, text, data, show, cure = type, str, bytes, ascii, NETWORK_CURE
    names, numeric = frozenset(host.lower() for host, _ in allowed.connect), _numeric_test()

    def check(args: tuple[Any, ...]) -> str:
        host = args[0]
        if host is None:
            return ""
        if kind(host) is data:
            host = host.decode("ascii", "replace")
        if kind(host) is text and (host.lower() in names or numeric(host)):
            return ""
        return f"the sandbox refuses to look up {show(host) if kind(host) is text else 'a name'}: {cure}"

    return check
