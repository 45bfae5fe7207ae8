"""Restricts this process by Landlock, the Linux kernel's own sandbox, which a process enters and cannot leave.

Landlock holds against native code too, where audit hooks do not. It takes three system calls, made through ctypes, so
nothing has to be installed. A kernel knows the rights of its ABI; what a newer ABI would add is left out, and
`restrict` returns the ABI that it found. What no ABI up to 7 covers: other protocols than TCP, which the filter of
`seccomp` denies, and what only the audit hooks deny: listening without a bind, the mode, owner and times of files,
starting a process (though not executing a program in it).

It binds the calling thread and the threads that it starts later: call it before there are others.

Source: the kernel's Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntFlag

# System call numbers, the same on every architecture that came after Linux 5.0 unified them; Alpha and MIPS differ.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_SAME_NUMBERS = ("x86_64", "aarch64", "armv7l", "i686", "ppc64le", "riscv64", "s390x", "loongarch64")

_VERSION_FLAG = 1  # LANDLOCK_CREATE_RULESET_VERSION
_PATH_BENEATH, _NET_PORT = 1, 2
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h


class Files(IntFlag):
    """Rights on files: `LANDLOCK_ACCESS_FS_*`."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13  # rename and link from one directory to another
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


class Net(IntFlag):
    """Rights on the network: `LANDLOCK_ACCESS_NET_*`."""

    BIND_TCP = 1 << 0
    CONNECT_TCP = 1 << 1


class Scope(IntFlag):
    """What does not leave the sandbox: `LANDLOCK_SCOPE_*`."""

    ABSTRACT_UNIX_SOCKET = 1 << 0
    SIGNAL = 1 << 1


# The first ABI that knows each right. Below 2, REFER is always denied.
_FILES_SINCE = {Files.REFER: 2, Files.TRUNCATE: 3, Files.IOCTL_DEV: 5}
_NET_SINCE, _SCOPE_SINCE = 4, 6

# Rights that apply to a file that is not a directory; the kernel rejects a rule with others.
_ON_FILE = Files.EXECUTE | Files.WRITE_FILE | Files.READ_FILE | Files.TRUNCATE | Files.IOCTL_DEV
_READ = Files.READ_FILE | Files.READ_DIR
_WRITE = (
    _READ
    | Files.WRITE_FILE
    | Files.TRUNCATE
    | Files.MAKE_REG
    | Files.MAKE_DIR
    | Files.REMOVE_FILE
    | Files.REMOVE_DIR
    | Files.REFER
)  # files and directories only: no links, sockets, pipes and devices


class LandlockMissing(Exception):
    """This kernel or platform has no Landlock; the text says why."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What stays allowed. Everything else is denied, executing programs and binding ports without exception.

    Attributes:
        read: files and directories, with everything below them; those that do not exist are skipped.
        write: files and directories that may be written to and read; they have to exist.
        ports: TCP ports that may be connected to, on any host: the kernel does not look at addresses.
    """

    read: tuple[str, ...]
    write: tuple[str, ...]
    ports: tuple[int, ...]


def handled(abi: int) -> tuple[Files, Net, Scope]:
    """Returns all the rights that an ABI knows."""
    files = Files(0)
    for right in Files:
        if _FILES_SINCE.get(right, 1) <= abi:
            files |= right
    net = Net.BIND_TCP | Net.CONNECT_TCP if abi >= _NET_SINCE else Net(0)
    scope = Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL if abi >= _SCOPE_SINCE else Scope(0)
    return files, net, scope


def restrict(rules: Rules) -> int:
    """Restricts this thread and those that it starts, permanently; returns the kernel's ABI.

    Raises:
        LandlockMissing: it is not available here; nothing has been restricted.
        OSError: a path of `write` does not exist, or the kernel rejected a step.
    """
    if not sys.platform.startswith("linux"):
        raise LandlockMissing(f"{sys.platform} does not have it")
    if platform.machine() not in _SAME_NUMBERS:
        raise LandlockMissing(f"its system call numbers are not known for {platform.machine()}")
    kernel = LandlockKernel()
    abi = kernel.abi()
    files, net, scope = handled(abi)
    ruleset = kernel.create(int(files), int(net), int(scope))
    try:
        _add_paths(kernel, ruleset, rules.read, _READ & files, must_exist=False)
        _add_paths(kernel, ruleset, rules.write, _WRITE & files, must_exist=True)
        for port in rules.ports if net else ():
            kernel.add_port(ruleset, int(Net.CONNECT_TCP), port)
        kernel.enforce(ruleset)
    finally:
        os.close(ruleset)
    return abi


def _add_paths(kernel: LandlockKernel, ruleset: int, paths: Iterable[str], rights: Files, *, must_exist: bool) -> None:
    for path in paths:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            if must_exist:
                raise
            continue
        try:
            kernel.add_path(ruleset, int(rights if os.path.isdir(path) else rights & _ON_FILE), descriptor)
        finally:
            os.close(descriptor)


class LandlockKernel:
    """Makes the system calls. ctypes is imported here only: no module may keep a reference to it."""

    def __init__(self) -> None:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall.restype = ctypes.c_long

        def call(name: str, number: int, *arguments: int | bytes) -> int:
            # A C library's `syscall` takes any number of arguments; each is as wide as a register.
            wide = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
            result = int(libc.syscall(ctypes.c_long(number), *wide))
            if result < 0:
                error = ctypes.get_errno()
                raise OSError(error, f"{name}: {os.strerror(error)}")
            return result

        def no_new_privileges() -> None:
            if libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) != 0:
                error = ctypes.get_errno()
                raise OSError(error, f"prctl(PR_SET_NO_NEW_PRIVS): {os.strerror(error)}")

        self._call: Callable[..., int] = call
        self._no_new_privileges = no_new_privileges

    def abi(self) -> int:
        try:
            return self._call("landlock_create_ruleset", _CREATE_RULESET, 0, 0, _VERSION_FLAG)
        except OSError as error:  # ENOSYS: not built in, or before 5.13; EOPNOTSUPP: switched off at boot
            raise LandlockMissing(f"this kernel does not have it: {error.strerror}") from None

    def create(self, files: int, net: int, scope: int) -> int:
        words = [files] + ([net] if net or scope else []) + ([scope] if scope else [])
        attributes = b"".join(word.to_bytes(8, sys.byteorder) for word in words)
        return self._call("landlock_create_ruleset", _CREATE_RULESET, attributes, len(attributes), 0)

    def add_path(self, ruleset: int, rights: int, descriptor: int) -> None:
        rule = rights.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)  # a packed struct
        self._call("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)

    def add_port(self, ruleset: int, rights: int, port: int) -> None:
        rule = rights.to_bytes(8, sys.byteorder) + port.to_bytes(8, sys.byteorder)
        self._call("landlock_add_rule", _ADD_RULE, ruleset, _NET_PORT, rule, 0)

    def enforce(self, ruleset: int) -> None:
        self._no_new_privileges()  # the kernel requires it of users other than root
        self._call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
