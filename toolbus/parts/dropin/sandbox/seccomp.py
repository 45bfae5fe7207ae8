"""Denies system calls that Landlock has no rights for, also to native code: a filter of seccomp, for good.

A sandboxed process makes TCP sockets only. So it reaches no unix socket: not those of the bus, and no other program's.
It cannot leave its process group, so whatever it forks ends with it, and it cannot use io_uring, which would make
sockets past this filter.

The filter binds the calling thread and what it starts later: call `deny_system_calls` before there are others.

Source: the kernel's Documentation/userspace-api/seccomp_filter.rst, include/uapi/linux/{seccomp,filter,audit}.h, and
the tables of system calls of each architecture.
"""

from __future__ import annotations

import errno
import os
import platform
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF instructions, on 32 bits
_NUMBER, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in `struct seccomp_data`; of arguments, their lower half
_X32 = 0x40000000  # from here on the numbers of a second interface of x86_64
_IO_URING_SETUP = 425  # on every architecture
_INSTRUCTION = struct.Struct("=HBBI")


@dataclass(frozen=True, slots=True)
class ArchitectureCalls:
    """What an architecture calls itself, and the numbers of its system calls."""

    arch: int
    socket: int
    setsid: int
    setpgid: int


_CALLS: Mapping[str, ArchitectureCalls] = {
    "x86_64": ArchitectureCalls(0xC000003E, 41, 112, 109),
    "aarch64": ArchitectureCalls(0xC00000B7, 198, 157, 154),
}


def deny_system_calls(*, datagrams: bool) -> str:
    """Installs the filter.

    Args:
        datagrams: whether UDP stays possible, which the C library looks names up with.

    Returns:
        Why it is not installed; empty if it is.
    """
    calls = _CALLS.get(platform.machine())
    if not sys.platform.startswith("linux") or calls is None:
        return f"no filter for {sys.platform} on {platform.machine()}"
    import ctypes  # here only: no module may keep a reference to it

    program = filter_of(calls, datagrams=datagrams)
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: how many instructions, and where they are
    given = struct.pack("@HP", len(program) // _INSTRUCTION.size, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    zero, one, mode = map(ctypes.c_ulong, (0, 1, _MODE_FILTER))
    done = libc.prctl(_PR_SET_NO_NEW_PRIVS, one, zero, zero, zero) == 0
    done = done and libc.prctl(_PR_SET_SECCOMP, mode, ctypes.c_char_p(given), zero, zero) == 0
    return "" if done else os.strerror(ctypes.get_errno())


def filter_of(calls: ArchitectureCalls, *, datagrams: bool) -> bytes:
    """Returns the instructions of the filter."""
    denied, absent = _ERRNO | errno.EACCES, _ERRNO | errno.ENOSYS
    inet = (int(socket.AF_INET), int(socket.AF_INET6))
    lookup = 16  # AF_NETLINK: the C library asks for the addresses of this machine with it
    kinds = [int(socket.SOCK_STREAM), *([int(socket.SOCK_DGRAM)] if datagrams else [])]
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_IF_EQUAL, 1, 0, calls.arch),
        (_RETURN, 0, 0, denied),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, absent),
    ]
    for number, answer in ((_IO_URING_SETUP, absent), (calls.setsid, denied), (calls.setpgid, denied)):
        code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    code += [
        (_IF_EQUAL, 1, 0, calls.socket),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST),
        (_IF_EQUAL, 0, 1, lookup),
        (_RETURN, 0, 0, _ALLOW),
        (_IF_EQUAL, 2, 0, inet[0]),
        (_IF_EQUAL, 1, 0, inet[1]),
        (_RETURN, 0, 0, denied),
        (_LOAD, 0, 0, _SECOND),
        (_AND, 0, 0, 0xF),  # without SOCK_NONBLOCK and SOCK_CLOEXEC
    ]
    for kind in kinds:
        code += [(_IF_EQUAL, 0, 1, kind), (_RETURN, 0, 0, _ALLOW)]
    code += [(_RETURN, 0, 0, denied)]
    return b"".join(_INSTRUCTION.pack(*each) for each in code)
