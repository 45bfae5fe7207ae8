"""Starts, names, watches and ends the processes of a run, each by its own process id.

Every child gets a session of its own, so that Ctrl-C reaches the run only, which then ends its children in order. A run
that is killed itself takes its children along: its `Lifeline` ends them. Knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self, TypeVar

import psutil

from toolbus.processes.lifeline import Lifeline

ROOT = Path(__file__).resolve().parents[1]
GRPC_SWITCH = "-event_engine_client,-event_engine_listener"
READY_SECONDS = 30.0
LOOK_SECONDS = 0.02
FAULT_SIGNS = ("Traceback (most recent", "a fault of the bus")  # in a log, what no disturbance explains
_QUOTED_BYTES = 4000  # of a child's standard error
# Below the ports that systems give to clients, which could take one while its owner is away.
_FIXED_PORTS = range(20000, 32000)

T = TypeVar("T")


class ChildFailed(Exception):
    """A child ended, or printed nothing in time. The text quotes what it wrote to standard error."""


def environment(experiments: bool = False, **more: str) -> dict[str, str]:
    """Returns the environment of a child: this process's, without what would configure a bus or a client.

    Args:
        experiments: whether every gRPC process gets the same GRPC_EXPERIMENTS switch; otherwise none has one.
    """
    ambient = ("TOOLBUS_", "NEKO_", "MAIN_SERVER", "GRPC_EXPERIMENTS")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ambient)}
    if experiments:
        variables["GRPC_EXPERIMENTS"] = GRPC_SWITCH
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
    return {**variables, "NO_COLOR": "1", **more}


class Child:
    """One process of a run.

    Args:
        log: the file that its output is appended to. Without one, standard output is read with `line`, and standard
            error is quoted when the process fails.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        lifeline: Lifeline,
        cwd: str | None = None,
        log: Path | None = None,
    ) -> None:
        self.name = name
        self._lifeline = lifeline
        self._errors: IO[bytes] = open(log, "ab") if log else tempfile.TemporaryFile()  # noqa: SIM115  # see end()
        self._unread = b""  # bytes of an incomplete line
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._errors if log else subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
        )
        lifeline.add(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None

    @property
    def resident_bytes(self) -> int:
        """Resident memory."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def line(self, seconds: float = READY_SECONDS) -> str:
        """Waits for the next line of standard output and returns it.

        Raises:
            ChildFailed: no line came in time, or the process has ended.
        """
        assert self._process.stdout is not None  # it has no log
        source = self._process.stdout.fileno()
        ends_at = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = ends_at - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                raise ChildFailed(f"{self.name} (pid {self.pid}) printed nothing for {seconds:g} s. {self.errors()}")
            read = os.read(source, 65536)
            if not read:
                code = self._process.wait()
                raise ChildFailed(f"{self.name} (pid {self.pid}) ended with code {code}. {self.errors()}")
            self._unread += read
        first, _, self._unread = self._unread.partition(b"\n")
        return first.decode()

    def errors(self) -> str:
        """Returns the end of what the process wrote to standard error."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _QUOTED_BYTES))
        text = self._errors.read().decode(errors="replace").strip()
        return f"Its standard error:\n{text}" if text else "It wrote nothing to standard error."

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        """Sends SIGTERM; what the process still prints can be read."""
        self._process.terminate()

    def wait(self, seconds: float | None = None) -> int:
        """Waits for the end and returns the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after so many seconds.
        """
        code = self._process.wait(seconds)
        self._lifeline.remove(self.pid)
        return code

    def kill(self) -> None:
        """Ends the process with SIGKILL and waits for it."""
        self._process.kill()
        self.wait()

    def end(self, seconds: float = 5.0) -> None:
        """Terminates the process, kills it where it does not end in time, and closes what is left."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


class Actor:
    """One program of a run over all its lives. What it prints is appended to a log.

    Attributes:
        starts: how often it was started.
        surprises: a sentence for each end that the run did not cause.
    """

    def __init__(self, name: str, log: Path, environment: Mapping[str, str], lifeline: Lifeline) -> None:
        self.name = name
        self.log = log
        self.starts = 0
        self.surprises: list[str] = []
        self._environment = environment
        self._lifeline = lifeline
        self._child: Child | None = None  # None before the first start
        self._ending = False  # whether the run has caused its end
        self._children: dict[int, psutil.Process] = {}  # that it has had

    @property
    def pid(self) -> int:
        """The id of the newest process."""
        assert self._child is not None  # started
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """Whether it runs now. An end that the run did not cause is noted."""
        if self._child is None:
            return False
        code = self._child.exit_code
        if code is None:
            return True
        if not self._ending:
            self._ending = True
            self.surprises.append(f"{self.name} (pid {self.pid}) ended by itself with code {code}: see {self.log}")
        return False

    def start(self, command: Sequence[str]) -> None:
        """Starts it, unless it runs."""
        if not self.is_running:
            self._child = Child(self.name, command, self._environment, self._lifeline, log=self.log)
            self._ending = False
            self.starts += 1

    def kill(self) -> int:
        """Ends it with SIGKILL and waits for that; returns the id of the process."""
        self.send(signal.SIGKILL)
        self._reap()
        return self.pid

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send(signal.SIGTERM)

    def has_ended(self) -> bool:
        """Whether it has ended."""
        if self.is_running:
            return False
        self._reap()
        return True

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, where it runs."""
        if self.is_running and self._child is not None:
            self._ending = self._ending or number in (signal.SIGKILL, signal.SIGTERM)
            self._child.send(number)

    def children(self, module: str) -> set[int]:
        """Returns the processes that it has started with a module."""
        found = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(self.pid).children() if self.is_running else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if module in each.cmdline():
                        self._children[each.pid] = each
                        found.add(each.pid)
        return found

    def left_behind(self) -> list[int]:
        """Returns the processes that it had started and that still run."""
        return [pid for pid, child in self._children.items() if child.is_running()]

    def faults(self) -> list[str]:
        """Returns what it did that the run did not cause: unexpected ends, and faults in its log."""
        text = self.text()
        counts = {sign: text.count(sign) for sign in FAULT_SIGNS}
        return [*self.surprises, *(f"{self.log.name} says {sign!r} {n} times" for sign, n in counts.items() if n)]

    def text(self) -> str:
        """Returns what it has printed so far."""
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""

    def _reap(self) -> None:
        if self._child is not None:
            self._child.end()


class BusProcess(NamedTuple):
    """A bus in a process of its own that is ready."""

    child: Child
    grpc: str
    http: str  # its URL; empty where it has no gateway


class Stage:
    """The processes of a run. Leaving the ``with`` block ends them, newest first.

    Args:
        environment: of every child; by default `environment()`.
        lifeline: that of the stage that this one is a part of.
    """

    def __init__(self, variables: Mapping[str, str] | None = None, lifeline: Lifeline | None = None) -> None:
        self.environment = environment() if variables is None else dict(variables)
        self.actors: dict[str, Actor] = {}
        self.lifeline = lifeline or Lifeline()
        self._owns_lifeline = lifeline is None
        self._children: list[Child] = []
        self._folders: list[tempfile.TemporaryDirectory[str]] = []  # that the children work in

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            child.end()
        for actor in self.actors.values():
            if actor.starts:
                actor.kill()
        if self._owns_lifeline:
            self.lifeline.close()
        for folder in self._folders:
            folder.cleanup()

    def folder(self) -> str:
        """Returns an empty folder, which is removed once all children have ended."""
        self._folders.append(tempfile.TemporaryDirectory(prefix="toolbus-lab-", ignore_cleanup_errors=True))
        return self._folders[-1].name

    def start(self, name: str, command: Sequence[str], cwd: str | None = None, **more: str) -> Child:
        """Starts a process; ``more`` is added to its environment."""
        child = Child(name, command, {**self.environment, **more}, self.lifeline, cwd)
        self._children.append(child)
        return child

    def module(self, module: str, *arguments: str, python: str = sys.executable) -> Child:
        """Starts ``python -m lab.<module>``."""
        return self.start(module, [python, "-m", f"lab.{module}", *arguments])

    def actor(self, name: str, folder: Path, **more: str) -> Actor:
        """Returns a program that can be started again and again, with its log in a folder."""
        self.actors[name] = Actor(name, folder / f"{name}.log", {**self.environment, **more}, self.lifeline)
        return self.actors[name]

    def bus(self, *options: str, command: str = "", grpc: str = "127.0.0.1:0", http: str = "off") -> BusProcess:
        """Starts a bus and waits until it is ready.

        Args:
            options: of `toolbus serve`; by default the bus persists nothing.
            command: see `bus_command`.
        """
        listening = ("--grpc", grpc, "--http", http)
        child = self.start("toolbus", bus_command(command, *listening, *(options or ("--ephemeral",))))
        ready = child.line()
        return BusProcess(
            child, address_of(ready, "grpc"), "" if http == "off" else f"http://{address_of(ready, 'http')}"
        )


def bus_command(command: str, *options: str) -> list[str]:
    """Returns the command line of a bus.

    Args:
        command: up to and with `serve`; empty: the program installed beside this Python, else its module.
    """
    if command:
        return [*shlex.split(command), *options]
    script = Path(sys.executable).with_name("toolbus")
    return [*([str(script)] if script.exists() else [sys.executable, "-m", "toolbus.cli"]), "serve", *options]


def address_of(ready: str, kind: str = "grpc") -> str:
    """Returns the first address of a kind in a ready line (``… ready grpc=ADDRESS[,ADDRESS] http=ADDRESS``).

    Raises:
        ChildFailed: the line has none.
    """
    for word in ready.split():
        if word.startswith(f"{kind}="):
            return word.removeprefix(f"{kind}=").split(",")[0]
    raise ChildFailed(f"expected a line `… {kind}=ADDRESS …`, got {ready!r}")


def processor_seconds(process: psutil.Process) -> float:
    """Returns how many seconds a process has computed, itself and the kernel for it."""
    times = process.cpu_times()
    return float(times.user + times.system)


def until(look: Callable[[], T], seconds: float, pause: float = LOOK_SECONDS) -> T:
    """Looks until there is something, for so long at most; returns what was seen last."""
    ends_at = time.monotonic() + seconds
    while not (seen := look()) and time.monotonic() < ends_at:
        time.sleep(pause)
    return seen


def free_ports(count: int) -> list[int]:
    """Returns ports of loopback that can be taken again and again while their owner is away."""
    ports: list[int] = []
    candidates = random.SystemRandom().sample(_FIXED_PORTS, len(_FIXED_PORTS))
    while len(ports) < count:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", candidates.pop()))
            except OSError:
                continue  # in use
            ports.append(listener.getsockname()[1])
    return ports


def stop_event() -> asyncio.Event:
    """Returns the event that SIGTERM sets in a child of a stage."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, event.set)
    return event
