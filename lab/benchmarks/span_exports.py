"""Measures what exported spans cost: processor time of the bus, and latency where the collector never reads."""

from __future__ import annotations

import json
import socket
from typing import Any

import uvloop

from lab.benchmarks.busy_bus import IN_FLIGHT, Spent, busy_bus, clock_of, in_turns, spent
from lab.benchmarks.contest import LAST_ANSWER_SECONDS, Plan
from lab.benchmarks.facts import Fact, compared
from lab.child import READY_SECONDS
from lab.load.windows import Cell, Window
from lab.stage import Stage
from toolbus.bus.rooms.traces_room import TracesRoom

RATIO = 0.01  # of the calls are sampled, up to as many a second as a bus samples by default
THREAD = "toolbus-traces"  # of the exporter
WORKS, NEVER_READS = "it works", "it takes connections and never reads"


def exporter(stage: Stage, plan: Plan, repeats: int, **settings: Any) -> tuple[Fact, ...]:
    """Compares windows in which calls are sampled and exported with windows without, which take turns, of one bus.

    Args:
        settings: others of the bus.
    """
    collector = stage.module("load.collector").line()
    settings = {"traces": collector, "trace_ratio": RATIO, **settings}
    found = uvloop.run(_sampled_in_turns(stage, repeats, settings))
    plain, sampled = found.values()
    title, line = (
        f"Processor time of a bus that exports the spans of {RATIO:.0%} of its calls",
        f"{IN_FLIGHT} in flight",
    )
    more = tuple(
        100.0 * (late.microseconds / early.microseconds - 1.0) for early, late in zip(plain, sampled, strict=True)
    )
    return (
        *(
            Fact("exporter", state, "µs a call", None, tuple(window.microseconds for window in each), title, line)
            for state, each in found.items()
        ),
        Fact("exporter", "more", "%", 3.0, more, title, line),
        Fact(
            *("exporter", "of it the exporter's thread", "%", 3.0),
            *(tuple(100.0 * window.of_thread / window.seconds for window in sampled), title, line),
        ),
    )


async def _sampled_in_turns(stage: Stage, pairs: int, settings: dict[str, Any]) -> dict[str, list[Spent]]:
    found: dict[str, list[Spent]] = {"without spans": [], "with spans": []}
    plain, sampled = found
    async with busy_bus(stage, **settings) as bus:
        room, traces = bus.core.rooms.find(TracesRoom), bus.core.dispatcher.traces
        take, config, clock = traces.take, bus.core.config, clock_of(THREAD)
        assert room is not None
        assert take is not None  # the bus has a collector
        for state in in_turns(plain, sampled, pairs):
            ratio = config.trace_ratio if state == sampled else 0.0
            traces.start(take, ratio=ratio, most=config.trace_most)
            found[state].append(await spent(bus, clock))
        if room.dropped:
            raise RuntimeError(f"the collector has not got {room.dropped} spans")
    if not all(window.of_thread for window in found[sampled]):
        raise RuntimeError("in a window the exporter's thread has done nothing")
    return found


def stuck_collector(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Compares the latency of calls of two buses, which take turns: one has a collector that never reads."""
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        stuck.settimeout(READY_SECONDS)
        urls = {
            WORKS: stage.module("load.collector").line(),
            NEVER_READS: f"http://127.0.0.1:{stuck.getsockname()[1]}",
        }
        addresses = {line: _traced_bus(stage, plan, url) for line, url in urls.items()}
        windows: dict[str, list[Window]] = {line: [] for line in urls}
        for line in in_turns(WORKS, NEVER_READS, repeats + 1):
            windows[line].append(_window(stage, plan, addresses[line]))
        stuck.accept()[0].close()  # it had the bus's connection
    title = f"p99 of calls of a bus with a collector, {IN_FLIGHT} in flight, {RATIO:.0%} sampled"
    # Without the first pair, in which the spans of the second bus were not late yet.
    facts = [
        Fact("stuck_collector", "p99", "ms", None, tuple(each.p99_us / 1e3 for each in seen[1:]), title, line)
        for line, seen in windows.items()
    ]
    return compared(facts, WORKS, "of the p99 with a collector that works")


def _traced_bus(stage: Stage, plan: Plan, collector: str) -> str:
    """Starts a bus with a collector, and a plugin; returns its address."""
    own = {"TOOLBUS_TRACES": collector, "TOOLBUS_TRACE_RATIO": str(RATIO)}
    stage.environment |= own
    address = plan.bus(stage).grpc
    for name in own:
        del stage.environment[name]
    stage.module("load.plugin", address).line()
    return address


def _window(stage: Stage, plan: Plan, address: str) -> Window:
    lengths = ("--seconds", str(plan.seconds), "--warm-up", str(plan.warm_up))
    with Stage(stage.environment, stage.lifeline) as own:
        host = own.module("load.stream_host", address, "--cells", str(Cell(IN_FLIGHT)), *lengths)
        return Window(**json.loads(host.line(plan.seconds + plan.warm_up + LAST_ANSWER_SECONDS)))
