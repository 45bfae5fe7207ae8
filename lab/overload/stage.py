"""One bus with its plugins and hosts, each a process of its own, none of which outlives the run."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.benchmarks.cells import Cell
from lab.benchmarks.children import Child, ChildFailed, Nursery, address, environment, grpc_address
from lab.overload.load import Answers, Schedule, read_numbers
from lab.overload.pace import BEGIN, LATE, LEFT_SECONDS
from lab.overload.watch import Watch, stretched, turns
from toolbus.processes.lifeline import Lifeline

HEAD_START = 0.5  # from the word to begin until the first call is due
MEASURE_SECONDS = 1.5


class Guarded(Nursery):
    """A nursery whose children end even where this process is killed."""

    def __init__(self, environment: Mapping[str, str], lifeline: Lifeline) -> None:
        super().__init__(environment)
        self._lifeline = lifeline

    def start(self, name: str, command: Sequence[str], cwd: str | None = None, **more: str) -> Child:
        """Starts a process."""
        child = super().start(name, command, cwd, **more)
        self._lifeline.add(child.pid)
        return child


@dataclass(frozen=True, slots=True)
class Measured:
    """The capacity, and how many times as long as alone on the machine the bus took for its work meanwhile."""

    calls_per_second: float
    stretch: float


@dataclass(slots=True)
class Seen:
    """What was seen of one part.

    Attributes:
        capacity: calls a second that were measured in the same run, before the load.
        phases: when calm ends, and when the load ends.
        answers: by host.
        ran: the numbers of the calls that plugins ran.
        notes: anything else that a part measured, by name.
        measured: the capacity, each time that it was measured.
        late: when hosts were to be woken, and how many seconds later they were.
    """

    capacity: float
    phases: tuple[float, float]
    answers: dict[str, Answers]
    ran: array[float]
    watch: Watch
    notes: dict[str, float] = field(default_factory=dict)
    late: Sequence[tuple[float, float]] = ()
    measured: Sequence[Measured] = ()

    @property
    def pace(self) -> float:
        """The mean of what was measured before and after the load: a machine may be half as fast in another minute."""
        return statistics.fmean(each.calls_per_second for each in self.measured) if self.measured else self.capacity

    @property
    def stretch(self) -> float:
        """How many times as long as alone on the machine the bus took for its work while that was measured."""
        return statistics.fmean(each.stretch for each in self.measured) if self.measured else 1.0


@dataclass(slots=True)
class Stage:
    """A bus that is ready, and who has been started beside it."""

    nursery: Guarded
    folder: Path
    bus: Child
    grpc: str
    http: str
    hosts: dict[str, Child] = field(default_factory=dict)
    plugins: dict[str, Child] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    _measure: Callable[[], Measured] | None = None  # how the capacity was measured last

    def plugin(self, source: str, *more: str, way: str = "sdk") -> Child:
        """Starts a plugin and waits until its tool is offered."""
        to = self.http if way == "callback" else self.grpc
        child = self._start("plugin", to, str(self.folder), source, "--way", way, *more)
        child.line()
        self.plugins[source] = child
        return child

    def host(self, name: str, *more: str, way: str = "host") -> Child:
        """Starts a host and waits until it could call."""
        to = self.http if way == "rest_host" else self.grpc
        child = self._start(way, to, str(self.folder), name, "--place", str(len(self.hosts)), *more)
        child.line()
        self.hosts[name] = child
        return child

    def capacity(
        self, in_flight: int, way: str = "load_host", seconds: float = MEASURE_SECONDS, hosts: int = 1
    ) -> float:
        """Measures how many calls a second are answered with so many in flight, hosts being as fast as they can.

        Args:
            in_flight: of each host.
            hosts: how many call at once, each in a process of its own.
        """
        self._measure = functools.partial(self._take_measure, in_flight, way, seconds, hosts)
        return self.capacity_again()

    def capacity_again(self) -> float:
        """Measures the capacity as it was measured last."""
        if self._measure is None:
            raise RuntimeError("the capacity was not measured yet")
        self.measured.append(self._measure())
        return self.measured[-1].calls_per_second

    def _take_measure(self, in_flight: int, way: str, seconds: float, hosts: int) -> Measured:
        arguments = ["invoke", self.http] if way == "rest_host" else [self.grpc]
        asked = ("--cells", str(Cell(in_flight)), "--seconds", str(seconds), "--warm-up", "0.5")
        command = (way, *arguments, *asked, "--middle-pid", str(self.bus.pid))
        before = turns(self.bus.pid)
        children = [self.nursery.module(*command) for _ in range(hosts)]
        found = sum(float(json.loads(child.line())["calls_per_second"]) for child in children)
        return Measured(found, stretched(before, turns(self.bus.pid)))

    def begin(self, schedules: Mapping[str, Schedule]) -> float:
        """Gives every host its schedule; returns when they begin."""
        at = time.monotonic() + HEAD_START
        for name, schedule in schedules.items():
            self.tell(name, f"{at} {schedule}")
        return at

    def tell(self, name: str, word: str = "") -> None:
        """Lets somebody begin."""
        part = self.folder / f"{name}.part"
        part.write_text(word)
        part.rename(self.folder / f"{name}.{BEGIN}")

    async def answers(self, seconds: float) -> dict[str, Answers]:
        """Waits until every host has written down what it saw."""
        files = {name: self.folder / f"{name}.answers" for name in self.hosts}
        patience = time.monotonic() + 2 * seconds + HEAD_START + 3 * LEFT_SECONDS
        while missing := [name for name, file in files.items() if not file.exists()]:
            for name in missing:
                host = self.hosts[name]
                if (host.has_ended and not files[name].exists()) or time.monotonic() > patience:
                    raise ChildFailed(f"{name} wrote down no answers. {host.complaints()}")
            await asyncio.sleep(0.05)
        return {name: Answers.read(file) for name, file in files.items()}

    def late(self) -> list[tuple[float, float]]:
        """Returns how late the machine woke the hosts, once they have written it down."""
        noted = [read_numbers(self.folder / f"{name}{LATE}") for name in self.hosts]
        return [(each[at], each[at + 1]) for each in noted for at in range(0, len(each), 2)]

    def ran(self) -> array[float]:
        """Ends the plugins and returns what they ran."""
        numbers = array("d")
        for source, child in self.plugins.items():
            child.end()
            numbers.extend(read_numbers(self.folder / f"{source}.ran"))
        return numbers

    def _start(self, module: str, *arguments: str) -> Child:
        return self.nursery.start(module, self.command(module, *arguments))

    def command(self, module: str, *arguments: str) -> list[str]:
        """Returns the command of one of the programs of this package."""
        return [sys.executable, "-m", f"lab.overload.{module}", *arguments]


class Scene:
    """Opens a stage and closes it again."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._nursery = Guarded(environment(True), lifeline)
        self._folder = Path(tempfile.mkdtemp(prefix="toolbus-overload-"))

    def __enter__(self) -> Stage:
        self._nursery.__enter__()
        serve = [sys.executable, "-m", "toolbus.cli", "serve", "--ephemeral"]
        bus = self._nursery.start("toolbus", [*serve, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"])
        try:
            ready = bus.line()
        except BaseException:
            self.__exit__()
            raise
        return Stage(self._nursery, self._folder, bus, grpc_address(ready), f"http://{address(ready, 'http')}")

    def __exit__(self, *failure: object) -> None:
        self._nursery.__exit__(*failure)
        shutil.rmtree(self._folder, ignore_errors=True)
