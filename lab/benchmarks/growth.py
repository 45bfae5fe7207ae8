"""Measures what one operation costs among more and more tools: in the core by itself, and with a bus over gRPC.

With a bus, every round builds the catalog of each size anew. A ratio compares the largest with the smallest of the
same run. Reading memory of the larger size costs more by itself: a bare dict with the same entries shows how much.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from multiprocessing import get_context
from typing import Any

from lab.benchmarks import many_tools
from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Column, Fact, Line, Measured, measured, microseconds
from lab.load import peer, workload
from lab.stage import Stage
from toolbus.v1 import tool_bus_service_pb2 as wire

TOOLS = (100, 10_000, 100_000)
FLAT = 1.5  # times the cost among the fewest: what an operation may cost among the most
OPERATIONS = 200  # of one sample
PART = 5_000  # tools of one attach: a message of the stream holds 16 MiB
SETTLE_SECONDS = 0.5
ANSWER_SECONDS = 120.0
BYTES = ("memory of each tool", "kB")


def catalog(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Registers, finds, lists and calls in the core, without a network, each size in a process of its own."""
    with ExitStack() as stack:
        processes = {
            f"{count:,} tools": stack.enter_context(
                # Not a fork: what this process holds would have to be collected there, too.
                ProcessPoolExecutor(1, get_context("spawn"), many_tools.build, (count, OPERATIONS))
            )
            for count in TOOLS
        }
        lines: dict[str, Line] = {line: functools.partial(_sampled, process) for line, process in processes.items()}
        # In turns, sample by sample, so that a busy machine meets all sizes.
        title = "The core, by registered tools"
        facts = measured("catalog", title, lines, plan.rounds * max(1, repeats // 3))
    return (*facts, *flatness(facts, "of the core", beside=many_tools.DICT))


async def _sampled(process: ProcessPoolExecutor) -> Measured:
    found = await asyncio.wrap_future(process.submit(many_tools.sample))
    return {column: (cost,) for column, cost in found.items()}


def served(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Registers, finds, lists and calls over gRPC, with a bus in a process of its own."""
    lines: dict[str, Line] = {
        f"{count:,} tools": functools.partial(_served, plan, count, max(1, repeats // 3)) for count in TOOLS
    }
    facts = measured("served", "A bus over gRPC, by registered tools", lines, plan.rounds)
    return (*facts, *flatness(facts, "over gRPC"))


async def _served(plan: Plan, count: int, repeats: int) -> Measured:
    async with AsyncExitStack() as stack:
        stage = stack.enter_context(plan.stage())
        bus, address, _ = stage.bus()
        stage.module("load.plugin", address).line()
        host = peer.Peer(address)
        await host.attach("bench-host", [])
        stack.push_async_callback(host.close)
        before = await asyncio.to_thread(bus.settled_bytes, SETTLE_SECONDS)
        plugins = [await attached_plugin(address, begin, min(PART, count - begin)) for begin in range(0, count, PART)]
        for plugin, reading in plugins:
            stack.push_async_callback(plugin.close)
            stack.callback(reading.cancel)
        held = await asyncio.to_thread(bus.settled_bytes, SETTLE_SECONDS) - before
        found = await operation_costs(host, plugins[0][0], repeats, f"tool_{count - 1}")
        found["list all, each tool", "µs"] = [await _list_all(host, count) / count for _ in range(repeats)]
        if count >= PART:  # of fewer, the size of a process shows nothing
            found[BYTES] = [held / count / 1e3]
        return found


async def attached_plugin(address: str, begin: int, count: int) -> tuple[peer.Peer, asyncio.Task[None]]:
    """Returns a plugin with so many tools, and the task that reads its stream."""
    plugin = peer.Peer(address, own_connection=True)
    tools = [peer.tool(f"tool_{number}") for number in range(begin, begin + count)]
    await plugin.attach(f"bench-{begin}", tools)
    return plugin, asyncio.create_task(read_all(plugin))


async def read_all(some: peer.Peer) -> None:
    """Reads a stream, so that its heartbeats are answered."""
    while await some.read() is not None:
        pass


async def operation_costs(
    host: peer.Peer, plugin: peer.Peer, repeats: int, name: str = workload.TOOL_NAME
) -> dict[Column, Sequence[float]]:
    """Times one operation of each kind, over gRPC, one after another.

    Args:
        plugin: who registers and unregisters.
        name: what is looked up.
    """
    session = plugin.attached.session_id

    async def register(number: int) -> None:
        request = wire.RegisterRequest(session_id=session, tools=[peer.tool(f"new_{number}")])
        if not (await host.stub.Register(request, timeout=ANSWER_SECONDS)).ok:
            raise RuntimeError("a tool was not registered")

    async def unregister(number: int) -> None:
        request = wire.UnregisterRequest(session_id=session, name=f"new_{number}")
        if not (await host.stub.Unregister(request, timeout=ANSWER_SECONDS)).removed:
            raise RuntimeError("a tool was not unregistered")

    async def find(number: int) -> None:
        if len((await host.stub.List(wire.ListRequest(names=[name]), timeout=ANSWER_SECONDS)).tools) != 1:
            raise RuntimeError(f"{name} was not listed")

    async def call(number: int) -> None:
        host.calls.append(peer.call(str(number), 1))
        host.flush()
        if (result := (await host.next_results())[0]).is_error:
            raise RuntimeError(f"a call failed: {result.error.message}")

    await microseconds(call, OPERATIONS)  # nothing of what happens once shows
    found: dict[Column, list[float]] = {}
    for _ in range(repeats):  # in turns: what is unregistered has to be registered before
        for sentence, run in {"call": call, "find": find, "register": register, "unregister": unregister}.items():
            times = OPERATIONS if run is call else OPERATIONS // 4
            found.setdefault((sentence, "µs"), []).append(await microseconds(run, times))
    return {**found}


async def _list_all(host: peer.Peer, count: int) -> float:
    """Lists every page and returns how many microseconds that takes."""
    began_at, token, seen = time.perf_counter(), "", 0
    while True:
        answer: Any = await host.stub.List(wire.ListRequest(page_token=token), timeout=ANSWER_SECONDS)
        seen += len(answer.tools)
        token = answer.next_page_token
        if not token:
            break
    if seen < count:
        raise RuntimeError(f"{seen} of {count} tools were listed")
    return (time.perf_counter() - began_at) * 1e6


def flatness(facts: Sequence[Fact], where: str, beside: str = "") -> tuple[Fact, ...]:
    """Returns, for each operation, its cost on the last line over that on the first, and what it may be.

    Args:
        beside: what is measured to compare with, and may cost whatever it does.
    """
    costs = [fact for fact in facts if fact.unit == "µs"]
    found = []
    for sentence in dict.fromkeys(fact.sentence for fact in costs):
        same = [fact for fact in costs if fact.sentence == sentence]
        first, last = same[0], same[-1]
        if first is not last:
            ratio = statistics.median(last.samples) / statistics.median(first.samples)
            text = f"{sentence} {where}: {last.line} over {first.line}"
            found.append(Fact(first.name, text, "×", None if sentence == beside else FLAT, (ratio,)))
    return tuple(found)
