"""Sets the kernel's limits on what a process uses: memory, processor time, files, processes.

They hold against a tool that runs away, native code included. A malicious tool can lift the limit on processor time,
which the process itself renews for each call: the audit hook denies that to Python, but not to native code.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from toolbus.parts.dropin.sandbox.sandbox_grants import MAX_OPEN_FILES, SandboxGrants
from toolbus.protocol.limits import MIB

# What grpc, the SDK and its 32 worker threads map after the start: 150 MiB were measured for grpc connected to a bus,
# with two arenas of glibc (see `clean_environment`; each further one reserves 64 MiB).
_SDK_BYTES = 224 * MIB
_STACK_BYTES = 2 * MIB  # of a thread started from Python, instead of 8

# RLIMIT_NPROC counts the threads of all processes of a user, who may start others meanwhile: it is for fork bombs only.
_EXTRA_THREADS = 1024

_IDLE_RENEWAL_SECONDS = 60.0  # how often processor time is granted anew while no call runs


def limit(grants: SandboxGrants) -> int:
    """Sets all limits but that on processor time, permanently; returns the bytes of address space, 0 if unlimited."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _lower(resource.RLIMIT_FSIZE, grants.file_bytes)  # Python ignores the signal: a write beyond it is an OSError
    threads = _threads_of_user()
    if threads:
        _lower(resource.RLIMIT_NPROC, threads + _EXTRA_THREADS)  # the kernel exempts root
    size = _address_space()
    if not size:
        return 0
    threading.stack_size(_STACK_BYTES)
    memory = size + _SDK_BYTES + grants.memory_bytes
    return memory if _lower(resource.RLIMIT_AS, memory) else 0


def _lower(kind: int, limit: int) -> bool:
    """Sets a limit that cannot be raised again; returns False if the platform does not allow it."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    try:
        resource.setrlimit(kind, (limit, limit))
    except (OSError, ValueError):  # macOS rejects RLIMIT_AS below what is mapped, and does not say how much that is
        return False
    return True


def _address_space() -> int:
    """Returns the bytes that this process has mapped, 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def _threads_of_user() -> int:
    """Returns how many threads all processes of this user have, 0 if the system does not say."""
    user, threads = os.getuid(), 0
    with contextlib.suppress(OSError):  # a system without /proc
        for process in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                if os.stat(f"/proc/{process}").st_uid == user:
                    threads += len(os.listdir(f"/proc/{process}/task"))
    return threads


class CpuGuard:
    """Ends the process, by SIGXCPU, when its calls take more processor time than they may.

    While calls run, the process may use ``seconds`` from the start of the newest of them. While none runs, and `watch`
    does, it may use as much in each minute: heartbeats add up over the weeks. The kernel counts whole seconds of all
    threads.

    Attributes:
        new_limits: a list of one item, the limits that are being set now: how the audit hook tells this class from a
            tool.
    """

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        self.new_limits: list[object] = [None]
        self._running = 0  # calls in flight
        self._watched = False  # whether there is a limit while no call runs
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CpuGuard {self.seconds} s running={self._running}>"

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Limits a call, from here to the end of the block; from any thread."""
        with self._lock:
            self._running += 1
            self._renew()
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._renew()

    def watch(self, pause: Callable[[float], object] = time.sleep) -> None:
        """Limits threads that a tool left running; called on a thread of its own, and never returns."""
        while True:
            with self._lock:
                self._watched = True
                if not self._running:
                    self._renew()
            pause(_IDLE_RENEWAL_SECONDS)

    def _renew(self) -> None:
        limited = self._running or self._watched
        self._set(math.ceil(_used()) + self.seconds if limited else resource.RLIM_INFINITY)

    def _set(self, soft: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        if hard != resource.RLIM_INFINITY:
            soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
        limits = (soft, hard)
        self.new_limits[0] = limits
        try:
            resource.setrlimit(resource.RLIMIT_CPU, limits)
        finally:
            self.new_limits[0] = None


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
