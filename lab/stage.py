"""Starts, names, watches and ends the processes of a run, each by its own process id.

Every child gets a session of its own, so that Ctrl-C reaches the run only, which then ends its children in order. A run
that is killed itself takes its children along: its `Lifeline` ends them. Knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from lab.child import Actor, Child, ChildFailed
from toolbus.processes.lifeline import Lifeline

ROOT = Path(__file__).resolve().parents[1]
GRPC_SWITCH = "-event_engine_client,-event_engine_listener"
LOOPBACK = "127.0.0.1:0"
LOOK_SECONDS = 0.02
# Below the ports that systems give to clients, which could take one while its owner is away.
_FIXED_PORTS = range(20000, 32000)

T = TypeVar("T")


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
        return self.adopt(Child(name, command, {**self.environment, **more}, self.lifeline, cwd))

    def adopt(self, child: Child) -> Child:
        """Ends a process with the others."""
        self._children.append(child)
        return child

    def module(self, module: str, *arguments: str, python: str = sys.executable) -> Child:
        """Starts ``python -m lab.<module>``."""
        return self.start(module, [python, "-m", f"lab.{module}", *arguments])

    def actor(self, name: str, folder: Path, **more: str) -> Actor:
        """Returns a program that can be started again and again, with its log in a folder."""
        self.actors[name] = Actor(name, folder / f"{name}.log", {**self.environment, **more}, self.lifeline)
        return self.actors[name]

    def bus(self, *options: str, grpc: str = LOOPBACK, http: str = "off", **more: str) -> BusProcess:
        """Starts a bus and waits until it is ready.

        Args:
            options: of `toolbus serve`; by default the bus persists nothing.
            more: is added to its environment.
        """
        listening = ("--grpc", grpc, "--http", http)
        child = self.start("toolbus", bus_command(*listening, *(options or ("--ephemeral",))), **more)
        ready = child.line()
        return BusProcess(
            child, address_of(ready, "grpc"), "" if http == "off" else f"http://{address_of(ready, 'http')}"
        )


def bus_command(*options: str) -> list[str]:
    """Returns the command line of a bus: of the program installed beside this Python, else of its module."""
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


def until(look: Callable[[], T], seconds: float, pause: float = LOOK_SECONDS) -> T:
    """Looks until there is something, for so long at most; returns what was seen last."""
    ends_at = time.monotonic() + seconds
    while not (seen := look()) and time.monotonic() < ends_at:
        time.sleep(pause)
    return seen


async def until_async(look: Callable[[], T], seconds: float, pause: float = LOOK_SECONDS) -> T:
    """Looks as `until` does, on a loop that goes on meanwhile."""
    ends_at = time.monotonic() + seconds
    while not (seen := look()) and time.monotonic() < ends_at:
        await asyncio.sleep(pause)
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
