"""Plays one kind of overload: a bus with its plugins and hosts, calm, load and calm again, and what all of them saw."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import statistics
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.child import Child, ChildFailed
from lab.ledger import Answer, Answers, read_numbers
from lab.load.schedule import LAST_ANSWER_SECONDS, Phase, Schedule, let_begin
from lab.load.windows import Cell
from lab.overload.parts import MAX_WAIT, MODEST, Part
from lab.overload.watch import GROWTH_MIB, Watch
from lab.stage import Stage, until_async

TIMES = 10  # the capacity, which are offered
HEAD_START = 0.3  # from the schedules until the first call is due
CALM_SHARE = 0.25  # of the capacity, before and after
MEASURE_SECONDS = 1.5
BUS_SECONDS = 3.0  # of measuring what it can take: its hosts do not begin at the same moment
NOTICE_SECONDS = 30.0
BYSTANDER = "bystander"  # a plugin that is killed in the middle of the load


@dataclass(frozen=True, slots=True)
class Plan:
    """How long the load lasts, and the calm before and after it."""

    seconds: float

    @property
    def calm(self) -> float:
        """Seconds of calm on either side."""
        return max(0.3, min(5.0, self.seconds / 4))

    @property
    def measure(self) -> float:
        """The share of the usual length for which a capacity is measured, less in a short run."""
        return min(1.0, self.seconds / 5)

    def schedules(self, part: Part, capacity: float) -> dict[str, Schedule]:
        """Returns the schedule of each host: calm, load and calm; all offer the same, but for the modest one."""
        names = [name for name in part.hosts if name != MODEST]
        share = capacity / len(names)
        calm = Phase(CALM_SHARE * share, self.calm)
        phases = (calm, Phase(TIMES * share, self.seconds), Phase(calm.rate, self.calm + MAX_WAIT))
        modest = Phase(capacity / 20, self.seconds + 2 * self.calm)
        return {name: Schedule(phases if name in names else [modest]) for name in part.hosts}


@dataclass(slots=True)
class Recording:
    """What was seen of one part.

    Attributes:
        capacities: calls a second that were measured in the same run: before the load, and for some parts after it.
        phases: when calm ends, and when the load ends.
        answers: by host.
        ran: the numbers of the calls that plugins ran.
        killed_at: when the bystander was killed.
    """

    capacities: list[float]
    phases: tuple[float, float]
    answers: dict[str, Answers]
    ran: array[float]
    watch: Watch
    killed_at: float = math.nan

    @property
    def capacity(self) -> float:
        """The mean of what was measured: a machine may be half as fast in another minute."""
        return statistics.fmean(self.capacities)

    @property
    def every_answer(self) -> Iterator[Answer]:
        return (answer for answers in self.answers.values() for answer in answers)

    def answers_in(self, phase: str, hosts: Sequence[str] | None = None) -> Iterator[Answer]:
        """Yields the answers to calls that were due ``before``, during the ``load`` or ``after`` it.

        Args:
            hosts: whose answers count; None for those of all.
        """
        calm, loaded = self.phases
        low, high = {"before": (0.0, calm), "load": (calm, loaded), "after": (loaded, math.inf)}[phase]
        counted = [answers for host, answers in self.answers.items() if hosts is None or host in hosts]
        return (answer for answers in counted for answer in answers if low <= answer.due < high)


class Run:
    """A bus that is ready, and the plugins and hosts that were started beside it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.folder = Path(stage.folder())
        self.bus, self.grpc, self.http = stage.bus(http="127.0.0.1:0")
        self.hosts: dict[str, Child] = {}
        self.plugins: dict[str, Child] = {}

    def plugin(self, part: Part) -> None:
        """Starts the plugin of a part and waits until its tool is offered."""
        to = self.http if part.plugin == "callback" else self.grpc
        options = ("--way", part.plugin, "--work", str(part.work), "--room", str(part.room), "--source", "tools")
        self.plugins["tools"] = self.stage.module("load.plugin", to, *options, "--ledger", str(self.folder / "ran"))
        self.plugins["tools"].line()

    def start_hosts(self, hosts: Mapping[str, Sequence[str]]) -> None:
        """Starts hosts, by name with their way and options, and waits until all of them could call."""
        for place, (name, (way, *more)) in enumerate(hosts.items()):
            to = self.http if way == "rest" else self.grpc
            arguments = (way, to, str(self.folder), name, "--place", str(place), *more)
            self.hosts[name] = self.stage.module("overload.hosts", *arguments)
        for host in self.hosts.values():
            host.line()

    def capacity(self, part: Part, plan: Plan) -> float:
        """Measures how many calls a second are answered, hosts being as fast as they can, each in its own process."""
        seconds = max((BUS_SECONDS if part.fills_bus else MEASURE_SECONDS) * plan.measure, 4 * part.work)
        program = ("load.host", "invoke", self.http) if part.over_rest else ("load.stream_host", self.grpc)
        lengths = ("--seconds", str(seconds), "--warm-up", str(min(0.5, seconds / 3)))
        window = (*program, "--cells", str(Cell(part.in_flight)), *lengths, "--middle-pid", str(self.bus.pid))
        children = [self.stage.module(*window) for _ in range(len(part.hosts) if part.fills_bus else 1)]
        return sum(float(json.loads(child.line())["calls_per_second"]) for child in children)

    def begin(self, schedules: Mapping[str, Schedule]) -> float:
        """Gives every host its schedule; returns when they begin."""
        at = time.monotonic() + HEAD_START
        for name, schedule in schedules.items():
            let_begin(self.folder, name, f"{at} {schedule}")
        return at

    async def answers(self, seconds: float) -> dict[str, Answers]:
        """Waits until every host has written down its answers."""
        files = {name: self.folder / f"{name}.answers" for name in self.hosts}
        for name, host in self.hosts.items():
            file, longest = files[name], 2 * seconds + HEAD_START + 3 * LAST_ANSWER_SECONDS
            await until_async(lambda: host.has_ended or file.exists(), longest)  # noqa: B023  # in this turn
            if not file.exists():
                raise ChildFailed(f"{name} wrote down no answers. {host.error_text()}")
        return {name: Answers.read(file) for name, file in files.items()}

    def ran(self) -> array[float]:
        """Ends the plugin and returns the numbers of the calls that it ran."""
        self.plugins["tools"].end()
        return read_numbers(self.folder / "ran")


async def play(part: Part, stage: Stage, plan: Plan) -> Recording:
    """Plays calm, load and calm, watches the bus meanwhile, and returns what was seen."""
    run = await asyncio.to_thread(Run, stage)
    bystander = stage.module("load.plugin", run.grpc, "--source", BYSTANDER, "--tool", BYSTANDER)
    await asyncio.to_thread(run.plugin, part)
    capacities = [await asyncio.to_thread(run.capacity, part, plan)]
    await asyncio.to_thread(run.start_hosts, part.hosts)
    await asyncio.to_thread(bystander.line)
    watch = Watch(run.bus, run.grpc, run.http, (*run.plugins, BYSTANDER))
    async with watch.running():
        watch.began_at = run.begin(plan.schedules(part, capacities[0]))
        killing = asyncio.create_task(_kill(bystander, watch, plan.calm + plan.seconds / 2))
        answers = await run.answers(plan.seconds + 2 * plan.calm + MAX_WAIT)
        killed_at = await killing
        await watch.settled(GROWTH_MIB)
        await until_async(lambda: _is_noticed(watch), NOTICE_SECONDS)  # a death that it never shows is judged
    if part.fills_bus:
        capacities.append(await asyncio.to_thread(run.capacity, part, plan))
    ran = await asyncio.to_thread(run.ran)
    phases = (plan.calm, plan.calm + plan.seconds)
    return Recording(capacities, phases, answers, ran, watch, killed_at)


async def _kill(bystander: Child, watch: Watch, at: float) -> float:
    await asyncio.sleep(at - watch.now)
    moment = watch.now
    os.kill(bystander.pid, signal.SIGKILL)
    return moment


def _is_noticed(watch: Watch) -> bool:
    """Whether health has shown the bystander's death."""
    return any(BYSTANDER in look.what and look.answer == "NOT_SERVING" for look in watch.looks)
