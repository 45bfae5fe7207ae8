"""Plays a soak: a bus, the programs round it, and a sample of it every second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import psutil

from lab.child import Actor, ChildFailed
from lab.soak import plugin
from lab.soak.sample import Record, Sample, Sampler
from lab.soak.verdict import MAX_LEFT, left
from lab.stage import Stage, address_of, bus_command, environment, until
from toolbus.errors import ToolBusError
from toolbus.sdk import SyncHost

START_SECONDS = 120.0  # of each program, on any machine
GRACE_SECONDS = 2.0  # of the bus: how long it lists the tools of a broken connection
SETTLE_SECONDS = 60.0  # until the bus has forgotten programs that have disconnected, on any machine;
UNCHANGED_SECONDS = 2 * GRACE_SECONDS  # what has not changed for so long, it does not forget
END_SECONDS = 40.0
PAUSE_SECONDS, PAUSE_SECONDS_SHORT, SHORT_SECONDS = 1.0, 0.2, 60.0  # between two samples; in a soak of up to a minute
EXTRA_SECONDS = 60.0  # beyond its time, until every kind of call and visit has been

Show = Callable[[Sample, Record], None]


class Soak:
    """One soak.

    Args:
        rate: calls a second.
        broken: how visitors misbehave on purpose, see `visits.Visits`; empty: they do not.
    """

    def __init__(self, folder: Path, seconds: float, rate: float, broken: str = "") -> None:
        self._folder = folder
        self._rate = rate
        self._broken = broken
        self._grpc = self._http = ""  # addresses, until the bus has printed them
        self.record = Record(seconds)

    def play(self, show: Show) -> Record:
        """Plays it; Ctrl-C ends it early. Whatever it started has ended when this returns or raises.

        Raises:
            ChildFailed: it could not begin.
        """
        with Stage(environment(experiments=True, TOOLBUS_GRACE_SECONDS=f"{GRACE_SECONDS:g}")) as stage:
            for name in ("bus", "plugin", "calls", "visits"):
                stage.actor(name, self._folder)
            self._play([*stage.actors.values()], show)
        for actor in stage.actors.values():
            for fault in actor.faults():
                self.record.fault(fault, cause=fault in actor.surprises)
        return self.record

    def _play(self, actors: Sequence[Actor], show: Show) -> None:
        bus, steady, calls, visits = actors
        self._start(bus, steady)
        process = psutil.Process(bus.pid)
        self.record.before = self._counted(process)
        sampler = Sampler(bus.pid, self._folder, self.record)
        here = [self._grpc, self._http, str(self._folder)]
        calls.start([sys.executable, "-m", "lab.soak.calls", *here, str(self._rate)])
        visits.start([sys.executable, "-m", "lab.soak.visits", *here, self._broken])
        try:
            if not until(sampler.have_all_begun, START_SECONDS):
                raise ChildFailed(f"calls and visits had not begun within {START_SECONDS:g} s")
            self._go_on(actors, sampler, show)
        except KeyboardInterrupt:
            pass  # the verdict is about what there is
        for actor in (calls, visits):
            self._end(actor)
        sampler.read()
        if bus.is_running:
            self._settle(process)
        for actor in (steady, bus):
            self._end(actor)

    def _go_on(self, actors: Sequence[Actor], sampler: Sampler, show: Show) -> None:
        """Samples every second (a short soak oftener), and goes on until every kind of call and visit has been."""
        began, at = time.monotonic(), 0.0
        planned = self.record.seconds_planned
        pause = PAUSE_SECONDS_SHORT if planned <= SHORT_SECONDS else PAUSE_SECONDS
        while all(actor.is_running for actor in actors):
            if at >= planned and (not self.record.never or at >= planned + EXTRA_SECONDS):
                return
            at += pause
            time.sleep(max(0.0, began + at - time.monotonic()))
            try:
                sample = sampler.sample(time.monotonic() - began)
            except psutil.NoSuchProcess:
                return  # the bus has ended, which is a fault that its log explains
            self.record.samples.append(sample)
            show(sample, self.record)

    # -- the programs -----------------------------------------------------------------------------------------------

    def _start(self, bus: Actor, steady: Actor) -> None:
        """Starts the bus and the plugins that stay, and waits for both."""
        data = ["--data-dir", str(self._folder / "data"), "--log-level", "warning"]
        bus.start(bus_command("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", *data))
        ready = until(lambda: self._ready_line(bus), START_SECONDS)
        if not ready:
            raise ChildFailed(f"the bus was not ready within {START_SECONDS:g} s: {bus.text()[-2000:]}")
        self._grpc, self._http = address_of(ready, "grpc"), address_of(ready, "http")
        steady.start([sys.executable, "-m", "lab.soak.plugin", self._grpc, self._http])
        if not until(lambda: steady.is_running and set(plugin.TOOLS) <= self._tools(), START_SECONDS):
            why = steady.text()[-2000:]
            raise ChildFailed(f"the plugins were not there within {START_SECONDS:g} s: {why}")
        # A bus that has just started calls unknown names UNAVAILABLE; calls and visits expect NOT_FOUND.
        if not until(self._has_settled, GRACE_SECONDS + START_SECONDS, pause=0.1):
            raise ChildFailed(f"an unknown tool was not NOT_FOUND within {GRACE_SECONDS + START_SECONDS:g} s")

    def _ready_line(self, bus: Actor) -> str:
        """Returns the line with the bus's addresses; empty where it has not printed it yet."""
        if not bus.is_running:
            raise ChildFailed(f"the bus ended: {bus.text()[-2000:]}")
        lines = bus.text().splitlines(keepends=True)
        return next((line for line in lines if line.startswith("toolbus ready") and line.endswith("\n")), "")

    def _end(self, actor: Actor) -> None:
        actor.terminate()
        if not until(actor.has_ended, END_SECONDS):
            self.record.fault(f"{actor.name} was terminated and had not ended after {END_SECONDS:g} s")

    # -- what the bus holds ------------------------------------------------------------------------------------------

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
        changed_at = time.monotonic()

        def is_settled() -> bool:
            nonlocal changed_at
            before, self.record.after = self.record.after, self._counted(bus)
            # Files and threads always change a little.
            if any(before.get(name) != count for name, count in self.record.after.items() if name not in MAX_LEFT):
                changed_at = time.monotonic()
            is_forgotten = all(verdict.good for verdict in left(self.record))
            return is_forgotten or time.monotonic() > changed_at + UNCHANGED_SECONDS

        try:
            until(is_settled, SETTLE_SECONDS, pause=0.1)
        except ToolBusError as error:
            self.record.fault(f"the bus did not list what it holds: {error!r}")

    def _has_settled(self) -> bool:
        call = {"name": "never_offered", "arguments": {}}
        answer = httpx.post(f"http://{self._http}/api/tools/invoke", json=call, trust_env=False, verify=False)
        return bool(answer.json()["error"]["code"] == "NOT_FOUND")

    def _tools(self) -> set[str]:
        with SyncHost(self._grpc, source="soak") as host:
            return {listed.name for listed in host.list(timeout=START_SECONDS)}
