"""Measures what exported spans cost: processor time of the bus, and latency where the collector never reads."""

from __future__ import annotations

import functools
import json
import socket
from dataclasses import replace
from typing import Any

import uvloop

from lab.benchmarks.busy_bus import IN_FLIGHT, busy_bus, spent
from lab.benchmarks.contest import LAST_ANSWER_SECONDS, Plan
from lab.benchmarks.facts import Fact, Line, Measured, compared, measured, measured_here
from lab.child import READY_SECONDS
from lab.load.windows import Cell, Window
from lab.stage import Stage, address_of
from toolbus.parts.observability.traces_room import TracesRoom

RATIO = 0.01  # of the calls are sampled, up to as many a second as a bus samples by default
THREAD = "toolbus-traces"  # of the exporter
WITHOUT = "without spans"
WORKS, NEVER_READS = "it works", "it takes connections and never reads"


def exporter(stage: Stage, plan: Plan, repeats: int, **settings: Any) -> tuple[Fact, ...]:
    """Compares windows in which calls are sampled and exported with windows without, in turns, of one bus.

    Args:
        settings: others of the bus.
    """
    collector = _collector(stage)
    facts = uvloop.run(_exporter(stage, repeats, {"traces": collector, "trace_ratio": RATIO, **settings}))
    return compared(facts, WITHOUT, "times that without spans")


async def _exporter(stage: Stage, rounds: int, settings: dict[str, Any]) -> tuple[Fact, ...]:
    async with busy_bus(stage, **settings) as bus:
        room, traces, config = bus.core.rooms.find(TracesRoom), bus.core.calls.dispatcher.traces, bus.core.config
        take = traces.take
        assert room is not None
        assert take is not None  # the bus has a collector

        async def sampled(ratio: float, thread: str = "") -> Measured:
            traces.start(take, ratio=ratio, most=config.trace_most)
            return await spent(bus, thread)

        lines: dict[str, Line] = {
            WITHOUT: functools.partial(sampled, 0.0),
            "with spans": functools.partial(sampled, config.trace_ratio, THREAD),
        }
        facts = await measured_here("exporter", f"A bus that exports spans of {RATIO:.0%} of its calls", lines, rounds)
        if room.dropped:
            raise RuntimeError(f"the collector has not got {room.dropped} spans")
    if not all(facts[-1].samples):
        raise RuntimeError("the exporter's thread has done nothing in a window")
    return facts


def stuck_collector(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Compares the latency of calls of two buses, which take turns: one has a collector that never reads."""
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        stuck.settimeout(READY_SECONDS)
        urls = {
            WORKS: _collector(stage),
            NEVER_READS: f"http://127.0.0.1:{stuck.getsockname()[1]}",
        }
        lines: dict[str, Line] = {
            line: functools.partial(_latency, stage, plan, _traced_bus(stage, url)) for line, url in urls.items()
        }
        title = f"Calls of a bus with a collector, {IN_FLIGHT} in flight, {RATIO:.0%} sampled"
        facts = measured("stuck_collector", title, lines, repeats + 1)
        stuck.accept()[0].close()  # it had the bus's connection
    # Without the first round, in which the spans of the second bus were not late yet.
    facts = tuple(replace(fact, samples=fact.samples[1:]) for fact in facts)
    return compared(facts, WORKS, "of the p99 with a collector that works")


def _collector(stage: Stage) -> str:
    return address_of(stage.module("benchmarks.asgi_servers", "collector").line(), "http")


def _traced_bus(stage: Stage, collector: str) -> str:
    """Starts a bus with a collector, and a plugin; returns its address."""
    address = stage.bus(TOOLBUS_TRACES=collector, TOOLBUS_TRACE_RATIO=str(RATIO)).grpc
    stage.module("load.plugin", address).line()
    return address


async def _latency(stage: Stage, plan: Plan, address: str) -> Measured:
    lengths = ("--seconds", str(plan.seconds), "--warm-up", str(plan.warm_up))
    with Stage(stage.environment, stage.lifeline) as own:
        host = own.module("load.stream_host", address, "--cells", str(Cell(IN_FLIGHT)), *lengths)
        window = Window(**json.loads(host.line(plan.seconds + plan.warm_up + LAST_ANSWER_SECONDS)))
    return {("p99", "ms"): [window.p99_us / 1e3]}
