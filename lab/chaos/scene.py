"""Runs the cast on one machine: starts its processes and lines, does to them what is scheduled, and records it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.chaos.cast import BUS, Kind, Part, tools
from lab.chaos.schedule import Act, Event
from lab.child import Actor
from lab.load.line import Line
from lab.stage import Stage, free_ports, until_async

HERE = Path(__file__).parent
CHILD_MODULE = "toolbus.parts.dropin.group_process"
DRAIN_SECONDS = 60.0  # after which a terminated process is killed, and that counts as a fault


@dataclass(slots=True)
class Trouble:
    """What was done to a part, and when; both by the clock that all processes share.

    Attributes:
        ended: when it was undone, for example a process started again; infinite until then.
        pids: the processes that were killed.
        standstill: from when to when its processes were stopped for certain; the harness itself may be held up between
            its look at the clock and a signal.
    """

    part: str
    act: Act
    began: float
    ended: float = float("inf")
    pids: set[int] = field(default_factory=set)
    standstill: tuple[float, float] = (0.0, 0.0)


class Scene:
    """Everything that runs beside the harness.

    Args:
        broken: how plugins and hosts misbehave, see `lab.ledger.Runs` and `load.Load`; empty: they do not.

    Attributes:
        troubles: what was done so far.
        faults: what processes did that the run did not cause.
    """

    def __init__(self, parts: Sequence[Part], seed: int, folder: Path, stage: Stage, broken: str = "") -> None:
        self.parts = {part.name: part for part in parts}
        self.folder = folder
        self.troubles: list[Trouble] = []
        self.faults: list[str] = []
        self._seed = seed
        names = [*self.parts, "http"]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.grpc = f"127.0.0.1:{self.ports[BUS]}"
        self.http = f"127.0.0.1:{self.ports['http']}"
        # A fixed token, so that a folder may come back at once after it was killed.
        token = {"TOOLBUS_TOKEN": f"chaos-{seed}"}
        for part in parts:
            if part.kind is not Kind.LINE:
                more = token if part.kind is Kind.FOLDER else {}
                stage.actor(part.name, folder, CHAOS_BROKEN=broken, **more)
        self.actors = stage.actors
        self.lines = {part.name: Line(self.ports[part.name], self._behind(part)) for part in self._of(Kind.LINE)}

    async def set_up(self) -> None:
        if "folder" in self.parts:
            self._lay_out_tools()
        for line in self.lines.values():
            await line.open()
        for name, part in self.parts.items():
            if part.kind not in (Kind.LINE, Kind.HOST):
                self.start(name)

    def start_hosts(self) -> None:
        for part in self._of(Kind.HOST):
            self.start(part.name)

    def start(self, name: str) -> None:
        actor = self.actors[name]
        actor.start([sys.executable, *self._command(self.parts[name], actor.starts + 1)])

    async def end(self, kind: Kind) -> None:
        """Asks all parts of a kind to end, and waits for that."""
        names = [part.name for part in self._of(kind)]
        for name in names:
            self.actors[name].terminate()
        await asyncio.gather(*map(self._ended, names))

    async def close(self) -> None:
        for line in self.lines.values():
            await line.close()

    async def perform(self, event: Event) -> None:
        """Does something to a part, and undoes it after its time."""
        trouble = Trouble(event.part, event.act, time.monotonic())
        self.troubles.append(trouble)
        try:
            if event.part in self.lines:
                await self._on_line(self.lines[event.part], event)
            else:
                await self._on_process(self.actors[event.part], event, trouble)
        finally:
            trouble.ended = time.monotonic()

    async def _on_process(self, actor: Actor, event: Event, trouble: Trouble) -> None:
        children = actor.children(CHILD_MODULE) if self.parts[event.part].kind is Kind.FOLDER else set()
        if event.act is Act.KILL:
            trouble.pids = {actor.kill(), *children}
            await asyncio.sleep(event.seconds)
            self.start(event.part)
        elif event.act is Act.DRAIN:
            actor.terminate()
            await self._ended(event.part)
            await asyncio.sleep(event.seconds)
            self.start(event.part)
        elif event.act is Act.KILL_CHILD:
            trouble.pids = {pid for pid in children if _sent(pid, signal.SIGKILL)}
        else:
            frozen = [
                pid for pid in ({actor.pid} if event.act is Act.FREEZE else children) if _sent(pid, signal.SIGSTOP)
            ]
            stopped_at = time.monotonic()
            try:
                await asyncio.sleep(event.seconds)
            finally:
                trouble.standstill = stopped_at, time.monotonic()
                for pid in frozen:
                    _sent(pid, signal.SIGCONT)

    async def _on_line(self, line: Line, event: Event) -> None:
        if event.act is Act.DELAY:
            line.delay = random.Random(event.at).uniform(0.02, 0.3)
        elif event.act is Act.REFUSE:
            await line.close()
        elif event.act is Act.RESET:
            line.reset()
        else:
            line.stall()
        await asyncio.sleep(event.seconds)
        if event.act is Act.CUT:
            line.reset()
        if event.act is Act.REFUSE:
            await line.open()
        line.delay = 0.0
        line.flow()

    async def _ended(self, name: str) -> None:
        actor = self.actors[name]
        if not await until_async(actor.has_ended, DRAIN_SECONDS):
            self.faults.append(f"{name} (pid {actor.pid}) was terminated and had not ended after {DRAIN_SECONDS:g} s")
            actor.kill()

    def _of(self, kind: Kind) -> list[Part]:
        return [part for part in self.parts.values() if part.kind is kind]

    def _behind(self, line: Part) -> int:
        """Returns the port that a line leads to: a callback plugin's own, else the bus's."""
        owner = next(part for part in self.parts.values() if part.line == line.name)
        return self.ports[owner.name if owner.kind is Kind.CALLBACK else BUS]

    def _command(self, part: Part, generation: int) -> list[str]:
        folder, address = str(self.folder), f"127.0.0.1:{self.ports[part.line or BUS]}"
        offered = list(tools(list(self.parts.values())))
        if part.kind is Kind.BUS:
            words = ["serve", "--grpc", self.grpc, "--http", self.http, "--data-dir", str(self.folder / "data")]
            words += ["--log-level", "warning"]
            upstream = self._of(Kind.MAIN_SERVER)
            words += ["--upstream", f"http://127.0.0.1:{self.ports[upstream[0].name]}"] if upstream else []
            return ["-m", "toolbus.cli", *words]
        if part.kind is Kind.FOLDER:
            return ["-m", "toolbus.cli", "run", str(self.folder / "tools"), "--bus", self.grpc]
        if part.kind is Kind.PLUGIN:
            return ["-m", "lab.chaos.plugin", address, folder, part.name]
        if part.kind is Kind.CALLBACK:
            port = self.ports[part.name]
            public = self.ports[part.line or part.name]
            return ["-m", "lab.chaos.callback_plugin", f"http://{self.http}", folder, part.name, str(port), str(public)]
        lives = [folder, str(self._seed), str(generation), *offered]
        if part.kind is Kind.MAIN_SERVER:
            return ["-m", "lab.chaos.main_server", str(self.ports[part.name]), *lives]
        return ["-m", "lab.chaos.host", part.name, address, self.http, *lives]

    def _lay_out_tools(self) -> None:
        ledgers, folder = self.folder, self.folder / "tools"
        folder.mkdir()
        shutil.copy(HERE.parent / "ledger.py", folder / "_ledger.py")
        text = (HERE / "dropin_tool.py").read_text("utf-8").replace('"LEDGERS"', repr(str(ledgers)))
        (folder / "tool.py").write_text(text, "utf-8")
        (folder / "_manifest.json").write_text(
            json.dumps({"files": {"tool.py": {"write": [str(ledgers / "runs.jsonl")]}}})
        )


def _sent(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
