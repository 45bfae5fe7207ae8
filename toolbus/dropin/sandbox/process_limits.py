"""Limits of the kernel on what a process uses: memory, processor time, files, processes.

They hold against a tool that runs away, native code included. A tool that means harm can undo the one on processor
time, which the process itself sets anew for each call: the hooks refuse that to Python, but not to native code.
"""

from __future__ import annotations

import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from toolbus.dropin.sandbox.sandbox_grants import MAX_OPEN_FILES, Grants
from toolbus.tool import MIB

# What grpc, the SDK and its 32 worker threads map besides what is there at the start: 150 MiB were measured for grpc
# connected to a bus, with two arenas of glibc (see `clean_environment`; each further one reserves 64 MiB).
_OWN_BYTES = 224 * MIB
_STACK_BYTES = 2 * MIB  # of a thread started from Python, instead of 8

# RLIMIT_NPROC counts the threads of all processes of a user, who starts others meanwhile. A fork bomb ends here, an
# honest process must not.
_MORE_THREADS = 1024

_BESIDE_SECONDS = 60.0  # while no call runs, processor time is granted anew so often


def limit(grants: Grants) -> int:
    """Sets all limits but that on processor time, for good; returns the bytes of address space, 0 where unlimited."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _lower(resource.RLIMIT_FSIZE, grants.file_bytes)  # Python ignores the signal: a write beyond it is an OSError
    threads = _threads_of_user()
    if threads:
        _lower(resource.RLIMIT_NPROC, threads + _MORE_THREADS)  # the kernel exempts root
    size = _address_space()
    if not size:
        return 0
    threading.stack_size(_STACK_BYTES)
    memory = size + _OWN_BYTES + grants.memory_bytes
    return memory if _lower(resource.RLIMIT_AS, memory) else 0


def _lower(kind: int, wanted: int) -> bool:
    """Sets a limit that cannot be raised again; returns False where the platform does not let it be set."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    try:
        resource.setrlimit(kind, (wanted, wanted))
    except (OSError, ValueError):  # macOS refuses RLIMIT_AS below what is mapped, which it does not tell
        return False
    return True


def _address_space() -> int:
    """Returns how much this process has mapped, 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def _threads_of_user() -> int:
    """Returns how many threads all processes of this user have, 0 where the system does not say."""
    user, threads = os.getuid(), 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == user:
                threads += len(os.listdir(process / "task"))
        except OSError:  # it has ended meanwhile
            continue
    return threads


class CpuGuard:
    """Ends the process, by SIGXCPU, when its calls take more processor time than they may.

    While calls run, the process may use ``seconds`` from the start of the newest of them; while none runs, and once
    `watch` does, as much in a minute, for heartbeats add up over the weeks. The kernel counts whole seconds of all
    threads.

    Attributes:
        wanted: the limits that are being set, as the one object in a list: how the audit hook knows ours from those of
            a tool.
    """

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        self.wanted: list[object] = [None]
        self._running = 0  # calls
        self._watched = False  # whether there is a limit while none runs
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<CpuGuard {self.seconds} s running={self._running}>"

    @contextmanager
    def call(self) -> Iterator[None]:
        """Guards a call from here to the end of the block; from any thread."""
        with self._lock:
            self._running += 1
            self._set_anew()
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._set_anew()

    def watch(self, pause: Callable[[float], object] = time.sleep) -> None:
        """Limits what threads use that a tool has left behind; from a thread of its own, to the end of the process."""
        while True:
            with self._lock:
                self._watched = True
                if not self._running:
                    self._set_anew()
            pause(_BESIDE_SECONDS)

    def _set_anew(self) -> None:
        limited = self._running or self._watched
        self._set(math.ceil(_used()) + self.seconds if limited else resource.RLIM_INFINITY)

    def _set(self, soft: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        if hard != resource.RLIM_INFINITY:
            soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
        limits = (soft, hard)
        self.wanted[0] = limits
        try:
            resource.setrlimit(resource.RLIMIT_CPU, limits)
        finally:
            self.wanted[0] = None


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
