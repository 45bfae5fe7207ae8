"""Puts a process into its sandbox: closes descriptors, sets limits, applies Landlock, installs the audit hook.

The order matters. Every layer that is available is applied. The `Protection` names what is missing, and the caller
decides whether that is enough.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolbus.errors import SetupError
from toolbus.parts.dropin.sandbox.audit_hooks import Allowed, install
from toolbus.parts.dropin.sandbox.landlock import LandlockMissing, Rules, restrict
from toolbus.parts.dropin.sandbox.process_limits import CpuGuard, limit
from toolbus.parts.dropin.sandbox.sandbox_grants import SandboxGrants, bus_endpoint, readable_everywhere
from toolbus.parts.dropin.sandbox.seccomp import deny_system_calls
from toolbus.processes.child_environment import EVERY_PROCESS, VARIABLE_NAME
from toolbus.protocol.limits import MIB

_FILE_MODE = 0o600  # of a granted file that is created here


@dataclass(frozen=True, slots=True)
class Protection:
    """What protects the rest of the machine from this process.

    Attributes:
        landlock: the kernel's Landlock ABI, 0 if it is not active. From 4 on it covers TCP, from 6 on signals.
        landlock_missing: why it is not active; empty if it is.
        seccomp: whether system calls are filtered: no unix sockets, and no end of the process group.
        audit: whether the audit hook is installed.
        memory_bytes: the limit on address space, 0 if unlimited.
        cpu_seconds: the limit on processor time of a call, and of a minute without calls.
        cpu: limits each call, and watches what runs between calls.
    """

    landlock: int
    landlock_missing: str
    seccomp: bool
    audit: bool
    memory_bytes: int
    cpu_seconds: int
    cpu: CpuGuard = field(repr=False, compare=False)

    def as_text(self) -> str:
        """Returns a line for people."""
        kernel = f"Landlock ABI {self.landlock}" if self.landlock else f"no Landlock ({self.landlock_missing})"
        memory = f"{self.memory_bytes // MIB} MiB of address space" if self.memory_bytes else "memory unlimited"
        layers = f"{'' if self.seccomp else 'no '}seccomp, {'' if self.audit else 'no '}audit hooks"
        return f"{kernel}, {layers}, {memory}, {self.cpu_seconds} s CPU a call and a minute without calls"


def apply(
    grants: SandboxGrants,
    *,
    bus: str,
    readable: Sequence[Path] = (),
    keep_fds: Iterable[int] = (),
    landlock: bool = True,
    audit: bool = True,
) -> Protection:
    """Sandboxes this process, permanently.

    Call it first: on the main thread, before there are others and before grpc is imported, since Landlock binds a
    thread and those that it starts. Granted files that do not exist are created, empty.

    Args:
        bus: the bus's address, ``HOST:PORT`` or ``unix:PATH``.
        readable: further files and directories that may be read: the tool files. Name the files rather than their
            folder, or everything else in it can be read too.
        keep_fds: inherited descriptors that stay open besides 0, 1 and 2.
        landlock, audit: False leaves a layer out, to test the others.

    Raises:
        SetupError: it was not called first, or a granted path is not available; the process must not go on.
    """
    _require_first()
    written = _create_files(grants)
    endpoint = bus_endpoint(bus)
    unix = endpoint if isinstance(endpoint, str) else ""
    connect = (*grants.connect, *(() if isinstance(endpoint, str) else (endpoint,)))
    read = tuple(dict.fromkeys(os.path.realpath(path) for path in (*readable_everywhere(), *grants.read, *readable)))
    _close_all_but({0, 1, 2, *keep_fds})
    memory = limit(grants)
    abi, missing = 0, "switched off"
    if landlock:
        rules = Rules(read, (*written, "/dev/null"), tuple(sorted({port for _, port in connect})))
        abi, missing = _restrict(rules)
    unfiltered = "switched off"
    if landlock and not unix:  # the address of the bus would be out of reach
        unfiltered = deny_system_calls(datagrams=bool(grants.connect))
    guard = CpuGuard(grants.cpu_seconds_per_call)
    sys.dont_write_bytecode = True  # every attempt would be refused
    if audit:
        install(Allowed(read, written, connect, unix, kernel=abi > 0, limits=guard.new_limits))
    return Protection(abi, missing, not unfiltered, audit, memory, grants.cpu_seconds_per_call, guard)


def _require_first() -> None:
    """Refuses to sandbox a process that has threads or libraries which the sandbox would not bind."""
    if threading.current_thread() is not threading.main_thread() or _threads() != 1:
        raise SetupError(f"{_threads()} threads run already: sandbox the process first, on its main thread")
    if "grpc" in sys.modules:
        raise SetupError("grpc is imported already: sandbox the process before importing it")


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))  # native threads too
    except OSError:
        return threading.active_count()


def _create_files(grants: SandboxGrants) -> tuple[str, ...]:
    """Returns the resolved paths that may be written, after creating the files that did not exist."""
    written = []
    for path in grants.write:
        real = os.path.realpath(path)
        if not os.path.isdir(real):
            try:
                os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE))
            except OSError as error:
                raise SetupError(
                    f"the granted file {str(path)!r} cannot be created or opened ({error.strerror}): create its "
                    "directory, or grant another file"
                ) from None
        written.append(real)
    return tuple(written)


def _close_all_but(excluded: set[int]) -> None:
    """Closes what the process inherited: no layer takes away the access that an open descriptor gives."""
    try:
        inherited = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        inherited = list(range(4096))
    for number in set(inherited) - excluded:
        try:
            os.close(number)
        except OSError:  # the descriptor of the listing itself
            pass


def _restrict(rules: Rules) -> tuple[int, str]:
    try:
        return restrict(rules), ""
    except LandlockMissing as missing:
        return 0, str(missing)
    except OSError as error:  # the kernel rejected it; the paths of `rules` exist
        return 0, error.strerror or str(error)


# A variable that a process starts with stays readable in ``/proc/PID/environ`` for as long as it lives, also after it
# was removed from `os.environ`. So neither secrets nor the token are part of that environment: they come with the
# `ProcessPlan`.

_ADDED = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",  # else Python looks for modules in the working directory first
    "TOOLBUS_LANE": "off",  # its rules let it connect to the port for drop-in tools only
    "MALLOC_ARENA_MAX": "2",  # else glibc reserves 64 MiB for each thread, which counts as memory
}
_DECIDES_CODE = re.compile(r"LD_.*|DYLD_.*|PYTHON.*|TOOLBUS_.*|MALLOC_.*|GLIBC_.*|GCONV_PATH|PATH", re.ASCII)


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of a process to be sandboxed: what Python and the SDK need.

    Args:
        environment: to choose from; None means this process's.
    """
    return EVERY_PROCESS.choose(os.environ if environment is None else environment) | _ADDED


def granted_secrets(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the tools of a process may read besides; those that are not set stay unset.

    Raises:
        SetupError: a name is not a valid variable name, or the variable decides which code the process runs.
    """
    for name in names:
        if not VARIABLE_NAME.fullmatch(name):
            raise SetupError(f"the secret {name[:140]!r} is not a valid variable name: use letters, digits and _")
        if _DECIDES_CODE.fullmatch(name):
            raise SetupError(
                f"the secret {name!r} decides which code the process runs and cannot be granted: use another variable"
            )
    return {name: environment[name] for name in names if name in environment}
