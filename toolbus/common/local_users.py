"""Finds out which user of this machine a TCP socket on loopback belongs to, and names users and listeners.

Linux answers an exact question about one socket (``NETLINK_SOCK_DIAG``, see sock_diag(7)) to any program, in a few
microseconds however many connections there are. Other systems do not; there every answer is None.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Address = tuple[str, int]  # a host as a number, IPv6 without brackets, and a port

_SOCK_DIAG = 4  # protocol of a netlink socket
_BY_FAMILY = 20  # type of the message in both directions
_HEADER = struct.Struct("=LHHLL")  # length, type, flags (1: a request), sequence number, sender
_QUERY = struct.Struct("=BBBxL")  # family, protocol, extensions, states
_PORTS = struct.Struct("!HH")
# Interface and cookie of the socket. Interface 1 is loopback, and also finds sockets that are bound to it; with 0 the
# kernel would find no socket that is bound to any interface. This cookie stands for any socket.
_SOCKET = struct.pack("=LLL", 1, 0xFFFFFFFF, 0xFFFFFFFF)
_STATE = _HEADER.size + 1  # offsets in the answer
_ITS_COOKIE = _HEADER.size + 44
_ITS_PORTS = _HEADER.size + 4
_UID = struct.Struct("=LL")  # uid, inode
_COOKIE = struct.Struct("=Q")  # a number that no other socket gets until the machine restarts
_ITS_UID = _HEADER.size + 64
_LISTENS = 10  # TCP_LISTEN
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def kernel_socket() -> socket.socket | None:
    """Returns a socket to ask the kernel with; None where the system has none, or this process no descriptor left."""
    try:
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
    except (OSError, AttributeError):
        return None


def owner_of(end: Address, other: Address, kernel: socket.socket | None = None) -> int | None:
    """Returns the uid that owns one end of a TCP connection on loopback.

    Args:
        end: the address of the end whose owner to look up.
        other: the address that it is connected to.
        kernel: a `kernel_socket` that no other thread uses; None: one is opened.

    Returns:
        None where the system does not say, and for a socket without a program: the kernel reports uid 0 where it was
        closed, or its program ended.
    """
    answer = _ask(end, other, kernel)
    if answer is None:
        return None
    state, port, uid, inode, _ = answer
    # Where the kernel finds no such connection, it answers with the socket that listens.
    return uid if inode and state != _LISTENS and port == other[1] else None


def listener_owner(address: Address) -> int | None:
    """Returns the uid of the program that listens on a TCP address of this machine; None where none is known."""
    answer = _ask(address, (address[0], 0))
    if answer is None:
        return None
    state, _, uid, inode, _ = answer
    return uid if inode and state == _LISTENS else None


def listener_id(address: Address) -> str:
    """Returns an id of the socket that listens on a TCP address of this machine; empty where none is known.

    The same id later means the same socket: the program that listened there has not restarted meanwhile. The id holds
    until the machine restarts, and no other socket gets it.

    Raises:
        OSError: this process has no file descriptor left to ask with.
    """
    answer = _ask(address, (address[0], 0), strict=True)
    if answer is None:
        return ""
    state, _, _, inode, cookie = answer
    return f"{_boot_id()}:{inode}:{cookie}" if inode and state == _LISTENS else ""


@functools.cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def server_owner(end: Address, other: Address) -> int | None:
    """Returns the uid of the program that serves a connection which this process made.

    Args:
        end: the address of our end.
        other: the address that it is connected to.

    Returns:
        Until the program has accepted the connection, the uid of the one that listens there.
    """
    owner = owner_of(other, end)
    return listener_owner(other) if owner is None else owner


def _ask(
    end: Address, other: Address, kernel: socket.socket | None = None, *, strict: bool = False
) -> tuple[int, int, int, int, int] | None:
    """Returns state, port of the other end, uid, inode and cookie of a socket; None without an answer.

    Args:
        strict: whether it is an error that this process is out of file descriptors; else that is None too.

    Raises:
        OSError: see strict.
    """
    try:
        hosts = [host.removeprefix("::ffff:") if "." in host else host for host, _ in (end, other)]
        family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
        question = b"".join(
            (
                _HEADER.pack(72, _BY_FAMILY, 1, 1, 0),
                _QUERY.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF),
                _PORTS.pack(end[1], other[1]),
                *(socket.inet_pton(family, host).ljust(16, b"\0") for host in hosts),
                _SOCKET,
            )
        )
        with (
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
            if kernel is None
            else contextlib.nullcontext(kernel)
        ) as asked:
            asked.sendto(question, (0, 0))
            answer = asked.recv(1024, socket.MSG_DONTWAIT)  # the answer is there when `sendto` has returned
    except (ValueError, struct.error):  # not an address
        return None
    except (OSError, AttributeError) as error:  # no netlink: not Linux, or a sandbox forbids it
        if strict and isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS:
            raise
        return None
    if len(answer) < _ITS_UID + _UID.size or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    uid, inode = _UID.unpack_from(answer, _ITS_UID)
    (cookie,) = _COOKIE.unpack_from(answer, _ITS_COOKIE)
    return answer[_STATE], _PORTS.unpack_from(answer, _ITS_PORTS)[1], uid, inode, cookie


def unmapped_uid() -> int | None:
    """Returns the uid that the kernel shows for every user outside this user namespace; None where none is outside."""
    try:
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text("ascii").splitlines()]
        if sum(int(length) for _, _, length in ranges) >= 2**32 - 1:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text("ascii"))
    except (OSError, ValueError):  # not Linux
        return None


def show_user(uid: int) -> str:
    """Returns a user as a message shows one: ``user www-data (uid 33)``."""
    try:
        import pwd  # not on Windows

        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except (KeyError, ModuleNotFoundError):
        return f"uid {uid}"


def refusal_of(transport: Any, may_serve: Callable[[int], bool]) -> str:
    """Returns why a program may not get requests over a connection to it; empty where it may."""
    own, peer = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    uid = server_owner(own[:2], peer[:2]) if own and peer else None
    if uid is None or may_serve(uid):  # None: the system does not say
        return ""
    return f"port {peer[1]} belongs to {show_user(uid)}, who may not use this bus"


def socket_taken(path: Path) -> str:
    """Returns why a unix socket may not be made at a path; empty if nothing is there, or a socket without its program.

    What is not a socket of a program that has ended is somebody else's, and is never removed.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ""
    if not stat.S_ISSOCK(mode):
        return "is a file that is not a socket"
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)  # the path itself may be too long for a socket
        try:
            probe.connect(f"/proc/self/fd/{directory}/{path.name}" if sys.platform == "linux" else str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return ""
        except OSError:  # it does not accept now, or is a socket of another kind
            pass
        finally:
            os.close(directory)
    return "is a socket that another program uses"
