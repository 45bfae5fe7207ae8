"""A soak from its start to its end: a bus, the programs round it, and a look at it every second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
import psutil

from lab.benchmarks.children import GRPC_SWITCH, address
from lab.chaos.actor import Actor
from lab.soak import plugin
from lab.soak.sample import Looker, Record, Sample
from lab.soak.verdict import left
from tests.support.processes import environment
from toolbus.errors import ToolBusError
from toolbus.processes.lifeline import Lifeline
from toolbus.sdk import SyncHost

START_SECONDS = 30.0
GRACE_SECONDS = 2.0  # of the bus: how long it keeps the tools of those who broke off
# Until the bus has forgotten those who have gone: a share of the soak within bounds.
SETTLE_SHARE, SETTLE_LEAST, SETTLE_SECONDS = 0.1, 2 * GRACE_SECONDS, 20.0
END_SECONDS = 40.0
_LOOK_SECONDS = 0.05
SIGNS = ("Traceback (most recent", "a fault of the bus")

Tell = Callable[[Sample, Record], None]
T = TypeVar("T")


class SetUpFailed(Exception):
    """The bus or its plugins did not start."""


class Soak:
    """One soak.

    Args:
        rate: calls a second.
        broken: how visitors misbehave on purpose, see `visits.Visits`; empty: they do not.
        bus: what starts the bus, up to and with `serve`.
    """

    def __init__(self, folder: Path, seconds: float, rate: float, broken: str = "", bus: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._rate = rate
        self._broken = broken
        self._command = bus or (sys.executable, "-m", "toolbus.cli", "serve")
        self._grpc = self._http = ""  # addresses, until the bus has said them
        self.record = Record(seconds)

    def play(self, tell: Tell) -> Record:
        """Plays it; Ctrl-C ends it early. Whatever it started has ended when this returns or raises.

        Raises:
            SetUpFailed: it could not begin.
        """
        with Lifeline() as lifeline:
            told = environment({"TOOLBUS_GRACE_SECONDS": f"{GRACE_SECONDS:g}", "GRPC_EXPERIMENTS": GRPC_SWITCH})
            names = ("bus", "plugin", "calls", "visits")
            actors = [Actor(name, self._folder, told, lifeline) for name in names]
            try:
                self._play(actors, tell)
            finally:
                for actor in actors:
                    if actor.generation:
                        actor.kill()
            for actor in actors:
                self._look_back(actor)
        return self.record

    def _play(self, actors: Sequence[Actor], tell: Tell) -> None:
        bus, steady, calls, visits = actors
        self._start(bus, steady)
        process = psutil.Process(bus.pid)
        self.record.before = self._counted(process)
        looker = Looker(bus.pid, self._folder)
        here = [self._grpc, self._http, str(self._folder)]
        calls.start([sys.executable, "-m", "lab.soak.calls", *here, str(self._rate)])
        visits.start([sys.executable, "-m", "lab.soak.visits", *here, self._broken])
        try:
            if not _until(looker.all_speak, START_SECONDS):
                raise SetUpFailed(f"calls and visits had not begun within {START_SECONDS:g} s")
            self._go_on(actors, looker, tell)
        except KeyboardInterrupt:
            pass  # the verdict is about what there is
        self.record.fault_count = 0  # they are counted once all has been said
        for actor in (calls, visits):
            self._end(actor)
        looker.read()
        record = self.record
        record.codes, record.never = looker.codes, looker.never
        record.faults += looker.faults
        record.fault_count += looker.fault_count
        if bus.runs:
            self._settle(process)
        for actor in (steady, bus):
            self._end(actor)

    def _go_on(self, actors: Sequence[Actor], looker: Looker, tell: Tell) -> None:
        """Looks every second."""
        began, second = time.monotonic(), 0
        while second < self.record.seconds_asked and all(actor.runs for actor in actors):
            second += 1
            time.sleep(max(0.0, began + second - time.monotonic()))
            try:
                sample = looker.look(time.monotonic() - began)
            except psutil.NoSuchProcess:
                return  # the bus has ended, which is a fault that its log explains
            self.record.samples.append(sample)
            self.record.fault_count = looker.fault_count
            tell(sample, self.record)

    # -- the programs -----------------------------------------------------------------------------------------------

    def _start(self, bus: Actor, steady: Actor) -> None:
        """Starts the bus and the plugins that stay, and waits for both."""
        data = ["--data-dir", str(self._folder / "data"), "--log-level", "warning"]
        bus.start([*self._command, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", *data])
        ready = _until(lambda: _ready(bus), START_SECONDS)
        if not ready:
            raise SetUpFailed(f"the bus was not ready within {START_SECONDS:g} s: {bus.log.read_text()[-2000:]}")
        self._grpc, self._http = address(ready, "grpc").split(",")[0], address(ready, "http")
        steady.start([sys.executable, "-m", "lab.soak.plugin", self._grpc, self._http])
        if not _until(lambda: steady.runs and set(plugin.TOOLS) <= self._tools(), START_SECONDS):
            why = steady.log.read_text()[-2000:]
            raise SetUpFailed(f"the plugins were not there within {START_SECONDS:g} s: {why}")

    def _end(self, actor: Actor) -> None:
        actor.ask_to_end()
        if not _until(actor.over, END_SECONDS):
            self.record.fault(f"{actor.name} was asked to end and had not after {END_SECONDS:g} s")

    def _look_back(self, actor: Actor) -> None:
        """Notes what a program did that it should not."""
        for surprise in actor.surprises:
            self.record.fault(surprise, cause=True)
        log = actor.log.read_text("utf-8", "replace") if actor.log.exists() else ""
        for sign in SIGNS:
            if sign in log:
                self.record.fault(f"{actor.log.name} says {sign!r} {log.count(sign)} times")

    # -- what the bus says ------------------------------------------------------------------------------------------

    def _counted(self, bus: psutil.Process) -> dict[str, int]:
        """Returns what the bus holds, the session that asks included."""
        with SyncHost(self._grpc, source="soak") as host:
            stats, rules = (host.call(f"toolbus:{name}", timeout=5).unwrap() for name in ("stats", "permissions"))
            listed = host.list(include_offline=True, timeout=5)
        return {
            "sessions": stats["sessions"],
            "sources": stats["sources"],
            "roles": len(stats["roles"]),
            "tools": len(listed),
            "rules": sum(len(table) for table in rules.values()),
            "files": bus.num_fds(),
            "threads": bus.num_threads(),
        }

    def _settle(self, bus: psutil.Process) -> None:
        """Waits until the bus holds no more than it held before, and notes what it holds in the end."""

        def forgotten() -> bool:
            self.record.after = self._counted(bus)
            return all(finding.good for finding in left(self.record))

        try:
            _until(forgotten, min(max(SETTLE_SHARE * self.record.seconds, SETTLE_LEAST), SETTLE_SECONDS))
        except ToolBusError as problem:
            self.record.fault(f"the bus did not say what it holds: {problem!r}")

    def _tools(self) -> set[str]:
        try:
            answer = httpx.get(f"http://{self._http}/api/tools", trust_env=False)
        except httpx.TransportError:
            return set()
        return {tool["name"] for tools in answer.json()["tools_by_role"].values() for tool in tools}


def _ready(bus: Actor) -> str:
    """Returns the line with the bus's addresses, once there is one."""
    if not bus.runs:
        raise SetUpFailed(f"the bus ended: {bus.log.read_text()[-2000:]}")
    lines = bus.log.read_text("utf-8", "replace").splitlines(keepends=True)
    return next((line for line in lines if line.startswith("toolbus ready") and line.endswith("\n")), "")


def _until(look: Callable[[], T], seconds: float) -> T:
    """Looks until there is something, for so long at most; returns what was seen last."""
    until = time.monotonic() + seconds
    while not (seen := look()) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    return seen
