"""Describes what a sandboxed process may do besides calling the bus, and what every such process may read.

Plain values. Of the system it only asks which of the usual directories exist.
"""

from __future__ import annotations

import os
import site
import sys
from dataclasses import dataclass
from pathlib import Path

from toolbus.errors import SetupError
from toolbus.protocol.limits import MIB

MEMORY_BYTES = 512 * MIB
CPU_SECONDS = 30
FILE_BYTES = 64 * MIB
MAX_OPEN_FILES = 256  # 32 worker threads with a few each; an event loop and grpc need about 20

# What Python, its C library and grpc read besides Python's own directories. Without /dev/urandom grpc ends the process.
_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/timezone"),
    # Not all of /etc/ssl and /etc/pki: a bus of root could read the private keys there.
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ssl/cert.pem", "/etc/pki/ca-trust", "/etc/pki/tls/certs"),
    *("/etc/pki/tls/cert.pem", "/etc/pki/tls/openssl.cnf"),
    *("/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services"),
    *("/run/systemd/resolve", "/etc/mime.types", "/sys/devices/system/cpu", "/System/Library"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
)


@dataclass(frozen=True, slots=True)
class SandboxGrants:
    """What an operator grants to one process of tools. By default it may compute and talk to the bus, nothing else.

    Attributes:
        write: files and directories that may be read and written. A directory has to exist and includes everything
            below it; any other path is one file, which is created empty if it does not exist, and can be neither
            removed nor replaced. SQLite makes files beside its database and needs a directory.
        read: further files and directories that may be read.
        connect: hosts and TCP ports that may be connected to; an IPv6 host without brackets.
        memory_bytes: address space for tools, besides what Python, grpc and the SDK take.
        cpu_seconds_per_call: processor time that a call may take; beyond it the process is ended.
        file_bytes: the maximum size of a file that is written.
    """

    write: tuple[Path, ...] = ()
    read: tuple[Path, ...] = ()
    connect: tuple[tuple[str, int], ...] = ()
    memory_bytes: int = MEMORY_BYTES
    cpu_seconds_per_call: int = CPU_SECONDS
    file_bytes: int = FILE_BYTES

    def __post_init__(self) -> None:
        for path in (*self.write, *self.read):
            if not path.is_absolute():
                raise SetupError(f"a grant names the path {str(path)!r}, it must be an absolute path")
        for host, port in self.connect:
            if not host or not 1 <= port <= 65535:
                raise SetupError(f"a grant names {host!r} port {port}, it must be a host and a port from 1 to 65535")
        minimums = {"memory_bytes": 16 * MIB, "cpu_seconds_per_call": 1, "file_bytes": 1}
        for name, minimum in minimums.items():
            if getattr(self, name) < minimum:
                raise SetupError(f"a grant sets {name} to {getattr(self, name)}, it must be {minimum} or more")


def readable_everywhere() -> tuple[Path, ...]:
    """Returns what every sandboxed process may read: Python, its packages, and what the system's libraries need.

    No home, temporary, data or working directory. Of `sys.path` only what belongs to Python: the first entry may be a
    home directory.
    """
    python = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *site.getsitepackages()}
    python |= {entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")}
    toolbus = Path(__file__).parents[3]
    return tuple(path for path in (*map(Path, sorted(python)), toolbus, *map(Path, _SYSTEM)) if path.exists())


def bus_endpoint(bus: str) -> tuple[str, int] | str:
    """Returns host and port of the bus's address, or the path of its unix socket.

    Raises:
        SetupError: the address is not one of the two.
    """
    if bus.startswith("unix:") and len(bus) > 5:
        return os.path.realpath(bus.removeprefix("unix:"))
    host, _, port = bus.rpartition(":")
    if not host or not port.isdecimal():
        raise SetupError(f"the bus's address is {bus!r}, it must be HOST:PORT or unix:PATH")
    return host.strip("[]"), int(port)
