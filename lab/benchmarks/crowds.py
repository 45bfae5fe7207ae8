"""Measures what many sessions, calls in flight and watchers cost a bus, beside bare streams of grpcio.

Each session has a connection of its own, as those of so many processes would; all of them live in this process, which
shares the CPUs with the bus. Imports grpc, so the importer sets the environment before.
"""

from __future__ import annotations

import asyncio
import functools
import resource
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import psutil
import uvloop

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Column, Fact, Line, Measured, measured
from lab.benchmarks.growth import flatness, operation_costs, read_all
from lab.child import Child
from lab.load import peer, workload
from lab.load.windows import processor_seconds
from lab.stage import Stage, address_of
from toolbus.v1 import tool_bus_service_pb2 as wire

SESSIONS = (10, 1_000, 5_000)
WATCHERS = 1_000
HOLDERS = 4  # plugins, and as many hosts, so that there are more calls than one session may have
HELD_BY_ONE = workload.MAX_IN_FLIGHT
OTHER_FILES = 500
AT_ONCE = 50  # attaches at a time
SETTLE_SECONDS = 1.0
ANSWER_SECONDS = 120.0
MIN_FOR_MEMORY = 1_000  # of fewer, the size of a process shows nothing
Change = Callable[[peer.Peer, str], Awaitable[None]]
MEMORY = ("memory of each idle session", "kB")


def sessions(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Measures operations among idle sessions, and what those hold."""
    few = max(1, repeats // 3)
    lines: dict[str, Line] = {f"{count:,} sessions": functools.partial(_among, plan, count, few) for count in SESSIONS}
    lines[f"{MIN_FOR_MEMORY:,} bare streams of grpcio"] = functools.partial(_bare, plan, MIN_FOR_MEMORY)
    facts = measured("sessions", "A bus over gRPC, by idle sessions", lines, plan.rounds)
    return (*facts, *flatness(facts, "over gRPC"))


async def _among(plan: Plan, count: int, repeats: int) -> Measured:
    open_files(count)
    with plan.stage() as stage:
        bus, address, _ = stage.bus()
        stage.module("load.plugin", address).line()
        host = peer.Peer(address)
        await host.attach("bench-host", [])
        before = await resident(bus)
        began_at = time.perf_counter()
        async with crowd_of(address, count) as crowd:
            attached = (time.perf_counter() - began_at) * 1e6 / count
            held = await resident(bus) - before
            found: dict[Column, Sequence[float]] = {("attach", "µs"): [attached]}
            found |= await operation_costs(host, crowd[0], repeats)
            if count >= MIN_FOR_MEMORY:
                found[MEMORY] = [held / count / 1e3]
        await host.close()
        return found


def open_files(count: int) -> None:
    """Allows this process and its children as many open files as so many connections need."""
    needed = count + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RuntimeError(f"{count:,} sessions need {needed:,} open files, {hard:,} are allowed: raise `ulimit -n`")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


async def _bare(plan: Plan, count: int) -> Measured:
    open_files(count)
    with plan.stage() as stage:
        server = stage.module("benchmarks.relay", "bare")
        address = address_of(server.line())
        before = await resident(server)
        async with crowd_of(address, count):
            held = await resident(server) - before
        return {MEMORY: [held / count / 1e3]}


@asynccontextmanager
async def crowd_of(address: str, count: int, *, watch: bool = False) -> AsyncIterator[list[peer.Peer]]:
    """Attaches so many peers, and has their heartbeats answered; watchers are read by the caller."""
    waiting = iter(range(count))
    crowd: list[peer.Peer] = []

    async def attach_some() -> None:
        for number in waiting:
            one = peer.Peer(address, own_connection=True)
            crowd.append(one)
            await one.attach(f"bench-crowd-{number}", [], watch=watch)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, crowd)
        async with asyncio.timeout(ANSWER_SECONDS):
            await asyncio.gather(*(attach_some() for _ in range(AT_ONCE)))
        if not watch:
            for one in crowd:
                stack.callback(asyncio.create_task(read_all(one)).cancel)
        yield crowd


async def _close(crowd: list[peer.Peer]) -> None:
    await asyncio.gather(*(one.close() for one in crowd))


async def resident(child: Child) -> int:
    return await asyncio.to_thread(child.settled_bytes, SETTLE_SECONDS)


def held_calls(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Reads what a bus holds for each call in flight."""
    samples = []
    for _ in range(max(1, repeats // 3)):
        with plan.stage() as own:
            bus, address, _ = own.bus()
            plugins = [own.module("load.plugin", address, "--hold", str(HELD_BY_ONE)) for _ in range(HOLDERS)]
            for plugin in plugins:
                plugin.line()
            samples.append(uvloop.run(_held(bus, address, plugins)))
    sentence = f"memory of each call in flight, of {HOLDERS * HELD_BY_ONE:,}, small arguments"
    return Fact("held_calls", sentence, "kB", None, tuple(samples))


async def _held(bus: Child, address: str, plugins: Sequence[Child]) -> float:
    hosts = [peer.Peer(address, own_connection=True) for _ in plugins]
    for number, host in enumerate(hosts):
        await host.attach(f"bench-host-{number}", [])
    before = await resident(bus)
    for host in hosts:
        host.calls += [peer.call(str(number), number) for number in range(HELD_BY_ONE)]
        host.flush()
    for plugin in plugins:
        await asyncio.to_thread(plugin.line)  # each holds as many: calls go to the plugin with the fewest in flight
    held = await resident(bus) - before
    await _close(hosts)
    return held / (HOLDERS * HELD_BY_ONE) / 1e3


def watchers(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Times one change of the catalog, to the moment when all watchers have read the change, beside bare streams."""
    open_files(WATCHERS)
    bus, address, _ = stage.bus()
    bare = stage.module("benchmarks.relay", "bare")
    bare_address = address_of(bare.line())
    lines: dict[str, Line] = {
        "a bus, a tool is registered": functools.partial(_followed, bus, address, _registered, repeats),
        "bare streams of grpcio, the same change": functools.partial(
            _followed, bare, bare_address, _announced, repeats
        ),
    }
    title = f"{WATCHERS:,} watchers in one process"
    return measured("watchers", title, lines, plan.rounds)


async def _registered(some: peer.Peer, name: str) -> None:
    request = wire.RegisterRequest(session_id=some.attached.session_id, tools=[peer.tool(name)])
    await some.stub.Register(request, timeout=ANSWER_SECONDS)


async def _announced(some: peer.Peer, name: str) -> None:
    some.calls.append(peer.call(name, name=name))
    some.flush()


async def _followed(server: Child, address: str, change: Change, repeats: int) -> Measured:
    process = psutil.Process(server.pid)
    async with crowd_of(address, WATCHERS, watch=True) as crowd:
        last, middle, spent = [], [], [processor_seconds(process)]
        for number in range(repeats + 1):
            name = f"new_{number}"
            waiting = [asyncio.create_task(_reads_of(one, name)) for one in crowd]
            began_at = time.perf_counter()
            await change(crowd[0], name)
            async with asyncio.timeout(ANSWER_SECONDS):
                moments = [(moment - began_at) * 1e3 for moment in await asyncio.gather(*waiting)]
            last.append(max(moments))
            middle.append(statistics.median(moments))
            spent.append(processor_seconds(process))
        return {  # without the first time, which also reads what came before
            ("to the last that has read of it", "ms"): last[1:],
            ("to half of them", "ms"): middle[1:],
            # Of all times together: the kernel counts in hundredths of a second.
            ("processor time of the server, each watcher", "µs"): [(spent[-1] - spent[1]) * 1e6 / repeats / WATCHERS],
        }


async def _reads_of(watcher: peer.Peer, name: str) -> float:
    """Returns when a watcher has read that a tool was added."""
    while (frame := await watcher.read()) is not None:
        added = (listed.tool.name for event in frame.events for listed in event.catalog.added)
        if name in added:
            return time.perf_counter()
    raise RuntimeError("a watcher's stream ended")
