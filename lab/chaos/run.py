"""Plays a run: rounds of trouble, and the calm after each, in which the bus is compared with what it should be."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lab.chaos.cast import BUS, Kind, Part, tools
from lab.chaos.checks import judge
from lab.chaos.evidence import Evidence
from lab.chaos.scene import Scene
from lab.chaos.schedule import Act, Event, Round
from lab.chaos.starvation import Starvation
from lab.chaos.watcher import Watcher
from lab.child import ChildFailed
from lab.judge import Cases
from lab.ledger import CALLS, LedgerReader
from lab.stage import Stage

START_SECONDS = 180.0  # to come together, on any machine
SETTLE_SECONDS = 60.0  # in a calm, until which the catalog is what is alive on any machine
LATE_SECONDS, LATE_SHARE = 3.0, 0.1  # for runs whose calls have ended; less in a short run
PROGRESS_SECONDS = 3.0
# Between two calms of one bus process.
MORE_MEMORY_MB = 24.0
MORE_FILES = 12


PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a bus process held in a calm."""

    pid: int
    memory_mb: float
    files: int


class Run:
    """One run, and what is left of it.

    Args:
        print_line: takes lines about the progress.
        broken: how the cast misbehaves on purpose; empty: it does not.

    Attributes:
        verdicts: the rules with their cases; those about calls once it has been played.
        settled: seconds of each calm until the catalog was right.
    """

    def __init__(
        self,
        seed: int,
        rounds: Sequence[Round],
        parts: Sequence[Part],
        folder: Path,
        print_line: PrintLine,
        broken: str,
    ) -> None:
        self._rounds = rounds
        self._folder = folder
        self._print_line = print_line
        self._seed = seed
        self._parts = parts
        self._broken = broken
        self._leak: list[socket.socket] = []
        self._tools = tools(parts)
        self._catalog = Cases("in calm every way of listing shows what is alive")
        self._bus = Cases(f"in each calm a bus has at most {MORE_MEMORY_MB:g} MB and {MORE_FILES} files more")
        self._ends = Cases("no process ends, hangs or logs a fault by itself, and nothing is left behind")
        self._happened: list[str] = []  # since the last line of progress
        self._began = 0.0
        self.verdicts = [self._catalog, self._bus, self._ends]
        self.evidence = Evidence({}, ())
        self.events: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.settled: list[float] = []

    @property
    def findings(self) -> list[str]:
        return [finding for verdict in self.verdicts for finding in verdict.broken]

    async def play(self) -> None:
        """Plays it. Whatever it started has ended when this returns or raises.

        Raises:
            ChildFailed: it could not begin.
        """
        with Stage() as stage:
            scene = Scene(self._parts, self._seed, self._folder, stage, self._broken)
            watcher = Watcher(scene)
            try:
                await self._play(scene, watcher)
            finally:
                for held in self._leak:
                    held.close()
                await watcher.close()
                await scene.close()
        self._judge(scene, watcher)

    async def _play(self, scene: Scene, watcher: Watcher) -> None:
        await scene.set_up()
        watcher.start()
        if missing := await self._differences(watcher, START_SECONDS):
            raise ChildFailed(f"the cast did not come together within {START_SECONDS:g} s: {'; '.join(missing)}")
        scene.start_hosts()
        self._began = time.monotonic()
        beside = [asyncio.create_task(work) for work in (self._show_progress(scene), Starvation(scene).watch())]
        try:
            for each in self._rounds:
                await self._trouble(scene, each)
                await self._calm(scene, watcher, each)
            self._print_line("the hosts finish their calls")
            await asyncio.gather(scene.end(Kind.HOST), scene.end(Kind.MAIN_SERVER))
            await asyncio.sleep(min(LATE_SECONDS, LATE_SHARE * (time.monotonic() - self._began)))
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        await asyncio.gather(*map(scene.end, (Kind.PLUGIN, Kind.FOLDER, Kind.CALLBACK)))
        await scene.end(Kind.BUS)

    async def _trouble(self, scene: Scene, each: Round) -> None:
        async with asyncio.TaskGroup() as happening:
            for event in each.events:
                happening.create_task(self._at(scene, event))
            await asyncio.sleep(each.seconds)

    async def _at(self, scene: Scene, event: Event) -> None:
        await asyncio.sleep(event.at)
        self._happened.append(str(event))
        self.events[f"{event.act.value} {scene.parts[event.part].kind.value}"] += 1
        await scene.perform(event)

    async def _calm(self, scene: Scene, watcher: Watcher, each: Round) -> None:
        began = time.monotonic()
        missing = await self._differences(watcher, SETTLE_SECONDS)
        took = time.monotonic() - began
        self.settled += [] if missing else [took]
        self._catalog.take(f"round {each.number}: {'; '.join(missing)}" if missing else None)
        self._happened.append(f"calm, catalog right after {took:.1f} s" if not missing else "calm, CATALOG WRONG")
        await asyncio.sleep(max(0.0, each.calm_seconds - took))
        changed = await self._differences(watcher, SETTLE_SECONDS)  # what does not stay right does not become right
        self._catalog.take(f"at the end of round {each.number}: {'; '.join(changed)}" if changed else None)
        bus = psutil.Process(scene.actors[BUS].pid)
        self._sampled(Sample(bus.pid, bus.memory_info().rss / 1e6, bus.num_fds()))

        if self._broken == "leak":
            self._leak += (socket.create_connection(("127.0.0.1", scene.ports["http"])) for _ in range(MORE_FILES + 1))

    def _sampled(self, sample: Sample) -> None:
        """Compares a calm with the first one of the same process."""
        first = next((each for each in self.samples if each.pid == sample.pid), None)
        self.samples.append(sample)
        if first is None:
            return
        memory, files = sample.memory_mb - first.memory_mb, sample.files - first.files
        grown = memory > MORE_MEMORY_MB or files > MORE_FILES
        self._bus.take(f"bus (pid {sample.pid}): {memory:+.1f} MB, {files:+d} files" if grown else None)

    async def _differences(self, watcher: Watcher, seconds: float) -> list[str]:
        """Waits until each way of listing shows all tools and nothing else; returns what differs in the end."""
        until = time.monotonic() + seconds
        while True:
            found = [
                f"{way}: {_difference(set(self._tools), shown)}"
                for way, shown in (await watcher.views()).items()
                if shown != set(self._tools)
            ]
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # Ctrl-C, which asyncio.wait_for of Python 3.11 may swallow in `views`
            if not found or time.monotonic() > until:
                return found
            await asyncio.sleep(0.1)

    # -- showing and judging ----------------------------------------------------------------------------------------

    async def _show_progress(self, scene: Scene) -> None:
        """Prints every few seconds how far it is."""
        evidence = Evidence(scene.parts, ())
        ledger = LedgerReader(self._folder / CALLS)
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            for actor in scene.actors.values():
                _ = actor.is_running  # notes each that has ended by itself
            for line in ledger.new_lines():
                evidence.take_call_line(line, self._tools)
            codes = Counter(str(call.result("code")) for call in evidence.calls.values() if call.results)
            shown = " ".join(f"{code} {count}" for code, count in codes.most_common())
            happened, self._happened = ", ".join(self._happened), []
            self._print_line(
                f"{time.monotonic() - self._began:5.0f} s  calls {len(evidence.calls)}: {shown}  | {happened}"
            )

    def _judge(self, scene: Scene, watcher: Watcher) -> None:
        self.evidence = Evidence(scene.parts, scene.troubles, watcher.moves)
        self.evidence.read(self._folder, self._tools)
        if starved := sum(trouble.act is Act.STARVE for trouble in scene.troubles):
            self.events["a process had no processor"] = starved
        for name, actor in scene.actors.items():
            for finding in actor.faults():
                self._ends.take(finding)
            if not actor.surprises:
                self._ends.take(None)
            self.events[f"starts of {name}"] = actor.starts
        left = (pid for actor in scene.actors.values() for pid in actor.left_behind())
        for finding in (*scene.faults, *(f"process {pid} was left behind" for pid in left)):
            self._ends.take(finding)
        self.verdicts = [*judge(self.evidence), *self.verdicts]


def _difference(wanted: set[str], shown: set[str]) -> str:
    words = (("missing", wanted - shown), ("too many", shown - wanted))
    return ", ".join(f"{word} {' '.join(sorted(names))}" for word, names in words if names)
