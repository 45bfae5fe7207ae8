"""Measures what several buses cost: hosts with several addresses, plugins on several buses, and their sessions.

The buses and plugins are processes of their own, and the hosts run in this one. What is compared takes turns within one
round. Imports grpc, so the importer sets the environment before.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import uvloop

from lab.benchmarks.contest import Plan
from lab.benchmarks.crowds import crowd_of, open_files, resident
from lab.benchmarks.facts import Fact, Measured, compared, measured
from lab.child import Child
from lab.load.windows import processor_seconds
from lab.stage import Stage, address_of, stop_event
from toolbus.sdk import Host, Plugin

BUSES = 3
IN_FLIGHT = 64
PLUGINS = 1_000
REST_SECONDS = 5.0  # in which the processor time of buses at rest is counted
RATE = ("calls", "a second")
WINDOWS = 4  # of each line in one round, in turns

Called = Sequence[tuple[str, Host, str]]  # a line, who calls, and which tool
Open = Callable[[AsyncExitStack, Sequence[str], Stage], Awaitable[Called]]  # gets the addresses of three buses


def addresses(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Measures a host with three addresses beside one with one."""

    async def called(stack: AsyncExitStack, buses: Sequence[str], stage: Stage) -> Called:
        plugin_on(stage, "echo", buses)
        one = await stack.enter_async_context(Host(buses[0], source="one"))
        three = await stack.enter_async_context(Host(",".join(buses), source="three"))
        return ("1 address", one, "echo"), ("3 addresses", three, "echo")

    return in_turns("addresses", f"A host, {IN_FLIGHT} calls in flight", called, plan, to="1 address")


def plugins(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Measures a plugin on three buses beside one on one."""

    async def called(stack: AsyncExitStack, buses: Sequence[str], stage: Stage) -> Called:
        plugin_on(stage, "single", buses[:1])
        plugin_on(stage, "triple", buses)
        host = await stack.enter_async_context(Host(buses[0], source="host"))
        return ("on 1 bus", host, "single"), ("on 3 buses", host, "triple")

    return in_turns("plugins", f"A plugin, {IN_FLIGHT} calls in flight at one bus", called, plan, to="on 1 bus")


def before(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Measures a bus without shared settings beside that of another checkout (`--before FOLDER`)."""
    if not plan.before:
        return ()

    async def called(stack: AsyncExitStack, buses: Sequence[str], stage: Stage) -> Called:
        python = str(Path(plan.before, ".venv", "bin", "python"))
        words = (python, "-m", "toolbus.cli", "serve", "--grpc", "127.0.0.1:0", "--http", "off", "--ephemeral")
        older = address_of(stage.start("before", words, cwd=plan.before, PYTHONPATH=plan.before).line())
        lines = []
        for line, address in (("before", older), ("now", buses[0])):
            plugin_on(stage, "echo", [address])
            lines.append((line, await stack.enter_async_context(Host(address, source=line)), "echo"))
        return lines

    return in_turns("before", f"A bus alone, {IN_FLIGHT} calls in flight", called, plan, to="before")


def memory(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Measures what a plugin takes in memory for each further bus."""

    async def of_plugin() -> Measured:
        with plan.stage() as stage:
            buses = [stage.bus().grpc for _ in range(BUSES)]
            single, triple = plugin_on(stage, "single", buses[:1]), plugin_on(stage, "triple", buses)
            more = (await resident(triple) - await resident(single)) / (BUSES - 1)
            return {("for each further bus", "MB"): [more / 1e6]}

    return measured("memory", "Memory of a plugin", {"a plugin": of_plugin}, plan.rounds)


def at_rest(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Measures what 1,000 plugins hold at each of three buses, and what these do while nothing is called."""

    async def of_buses() -> Measured:
        open_files(BUSES * PLUGINS)
        with plan.stage() as stage:
            buses = [stage.bus() for _ in range(BUSES)]
            empty = [await resident(bus.child) for bus in buses]
            async with AsyncExitStack() as stack:
                for bus in buses:
                    await stack.enter_async_context(crowd_of(bus.grpc, PLUGINS))
                held = [await resident(bus.child) - less for bus, less in zip(buses, empty, strict=True)]
                processes = [psutil.Process(bus.child.pid) for bus in buses]
                before = [processor_seconds(each) for each in processes]
                await asyncio.sleep(REST_SECONDS)
                used = [processor_seconds(each) - less for each, less in zip(processes, before, strict=True)]
        return {
            ("of each session", "kB"): [each / PLUGINS / 1e3 for each in held],
            ("of a core, each bus", "%"): [each / REST_SECONDS * 100 for each in used],
        }

    return measured("at_rest", f"{PLUGINS:,} plugins at each of {BUSES} buses", {"at rest": of_buses}, plan.rounds)


def in_turns(name: str, title: str, called: Open, plan: Plan, *, to: str) -> tuple[Fact, ...]:
    """Measures lines in windows that take turns, and compares them with one of them."""
    return compared(uvloop.run(_in_turns(name, title, called, plan)), to, f"of that with {to}")


async def _in_turns(name: str, title: str, called: Open, plan: Plan) -> tuple[Fact, ...]:
    samples: dict[str, list[float]] = {}
    for _ in range(plan.rounds):
        async with AsyncExitStack() as stack:
            stage = stack.enter_context(plan.stage())
            lines = await called(stack, [stage.bus().grpc for _ in range(BUSES)], stage)
            for _, host, tool in lines:
                await window(host, tool, plan.warm_up)
            for turn in range(WINDOWS):
                for line, host, tool in lines if turn % 2 == 0 else [*reversed(lines)]:
                    samples.setdefault(line, []).append(await window(host, tool, plan.seconds))
    return tuple(Fact(name, *RATE, None, tuple(rates), title, line) for line, rates in samples.items())


async def window(host: Host, tool: str, seconds: float) -> float:
    """Calls a tool for so long, with so many calls in flight; returns the calls a second."""
    over, count = time.perf_counter() + seconds, 0

    async def call() -> None:
        nonlocal count
        while time.perf_counter() < over:
            result = await host.call(tool, {"text": "hello"})
            if result.error is not None:
                raise RuntimeError(f"a call failed: {result.error}")
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(IN_FLIGHT)))
    return count / (time.perf_counter() - began)


def plugin_on(stage: Stage, tool: str, buses: Sequence[str]) -> Child:
    """Starts a plugin with one tool in a process of its own, and waits until all its buses have it."""
    child = stage.module("benchmarks.several", ",".join(buses), tool)
    child.line()
    return child


async def serve(address: str, name: str) -> None:
    """Runs that plugin."""
    ended, plugin = stop_event(), Plugin(name, address=address, max_in_flight=1_000)

    async def echo(text: str) -> str:
        """Returns a text."""
        return text

    plugin.add_tool(echo, name=name)
    async with plugin:
        await plugin.ready()
        print("ready", flush=True)
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
