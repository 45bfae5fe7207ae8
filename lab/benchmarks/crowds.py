"""What many sessions, many calls in flight and many watchers cost a bus, beside bare streams of grpcio.

Each session has a connection of its own, as those of so many processes would; all of them live in this process, which
shares the CPUs with the bus. This module imports grpc, so whoever imports it sets the environment before.
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

from lab.benchmarks import peer, workload
from lab.benchmarks.children import Child, Nursery, environment, grpc_address
from lab.benchmarks.contest import Plan, start_bus
from lab.benchmarks.fact import Fact
from lab.benchmarks.growth import asked, flatness, read_all
from lab.benchmarks.table import Column, Line, Measured, measured
from toolbus.v1 import tool_bus_service_pb2 as wire

SESSIONS = (10, 1_000, 5_000)
WATCHERS = 1_000
HOLDERS = 4  # plugins, and as many hosts, so that there are more calls than one session may have
HELD_BY_ONE = workload.MAX_IN_FLIGHT
OTHER_FILES = 500
AT_ONCE = 50  # attaches at a time
SETTLE_SECONDS = 1.0
PATIENCE_SECONDS = 120.0
ENOUGH = 1_000  # of fewer, nothing can be told from the size of a process
Change = Callable[[peer.Peer, str], Awaitable[None]]
MEMORY = ("memory of each idle session", "kB")


def sessions(nursery: Nursery, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Measures operations among idle sessions, and what those hold."""
    few = max(1, repeats // 3)
    lines: dict[str, Line] = {f"{count:,} sessions": functools.partial(_among, plan, count, few) for count in SESSIONS}
    lines[f"{ENOUGH:,} bare streams of grpcio"] = functools.partial(_bare, plan, ENOUGH)
    facts = uvloop.run(measured("sessions", "A bus over gRPC, by idle sessions", lines, plan.rounds))
    return (*facts, *flatness(facts, "over gRPC"))


async def _among(plan: Plan, count: int, repeats: int) -> Measured:
    _open_files(count)
    with Nursery(environment(plan.experiments)) as nursery:
        bus, address = start_bus(nursery, plan)
        nursery.module("load_plugin", address).line()
        host = peer.Peer(address)
        await host.attach("bench-host", [])
        before = await _resident(bus)
        began_at = time.perf_counter()
        async with _crowd(address, count) as crowd:
            attached = (time.perf_counter() - began_at) * 1e6 / count
            held = await _resident(bus) - before
            found: dict[Column, Sequence[float]] = {("attach", "µs"): [attached]}
            found |= await asked(host, crowd[0], repeats)
            if count >= ENOUGH:
                found[MEMORY] = [held / count / 1e3]
        await host.close()
        return found


def _open_files(count: int) -> None:
    """Allows this process and its children as many open files as so many connections need."""
    needed = count + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RuntimeError(f"{count:,} sessions need {needed:,} open files, {hard:,} are allowed: raise `ulimit -n`")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


async def _bare(plan: Plan, count: int) -> Measured:
    _open_files(count)
    with Nursery(environment(plan.experiments)) as nursery:
        server = nursery.module("bare_streams")
        address = grpc_address(server.line())
        before = await _resident(server)
        async with _crowd(address, count):
            held = await _resident(server) - before
        return {MEMORY: [held / count / 1e3]}


@asynccontextmanager
async def _crowd(address: str, count: int, *, watch: bool = False) -> AsyncIterator[list[peer.Peer]]:
    """Attaches so many peers, and has their heartbeats answered; watchers are read by whoever asked for them."""
    waiting = iter(range(count))
    crowd: list[peer.Peer] = []

    async def some() -> None:
        for number in waiting:
            one = peer.Peer(address, own_connection=True)
            crowd.append(one)
            await one.attach(f"bench-crowd-{number}", [], watch=watch)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, crowd)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        if not watch:
            for one in crowd:
                stack.callback(asyncio.create_task(read_all(one)).cancel)
        yield crowd


async def _close(crowd: list[peer.Peer]) -> None:
    await asyncio.gather(*(one.close() for one in crowd))


async def _resident(child: Child) -> int:
    await asyncio.sleep(SETTLE_SECONDS)
    return int(psutil.Process(child.pid).memory_info().rss)


def held_calls(nursery: Nursery, plan: Plan, repeats: int) -> Fact:
    """Reads what a bus holds for each call in flight."""
    samples = []
    for _ in range(max(1, repeats // 3)):
        with Nursery(environment(plan.experiments)) as own:
            bus, address = start_bus(own, plan)
            plugins = [own.module("load_plugin", address, "--hold", str(HELD_BY_ONE)) for _ in range(HOLDERS)]
            for plugin in plugins:
                plugin.line()
            samples.append(uvloop.run(_held(bus, address, plugins)))
    sentence = f"memory of each call in flight, of {HOLDERS * HELD_BY_ONE:,}, small arguments"
    return Fact("held_calls", sentence, "kB", None, tuple(samples))


async def _held(bus: Child, address: str, plugins: Sequence[Child]) -> float:
    hosts = [peer.Peer(address, own_connection=True) for _ in plugins]
    for number, host in enumerate(hosts):
        await host.attach(f"bench-host-{number}", [])
    before = await _resident(bus)
    for host in hosts:
        host.calls += [peer.call(str(number), number) for number in range(HELD_BY_ONE)]
        host.flush()
    for plugin in plugins:
        await asyncio.to_thread(plugin.line)  # each holds as many: calls go to whoever owes the fewest
    held = await _resident(bus) - before
    await _close(hosts)
    return held / (HOLDERS * HELD_BY_ONE) / 1e3


def watchers(nursery: Nursery, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Times one change of the catalog, to the moment when so many watchers have read of it, beside bare streams."""
    _open_files(WATCHERS)
    bus, address = start_bus(nursery, plan)
    bare = nursery.module("bare_streams")
    bare_address = grpc_address(bare.line())
    lines: dict[str, Line] = {
        "a bus, a tool is registered": functools.partial(_told, bus, address, _registered, repeats),
        "bare streams of grpcio, told the same": functools.partial(_told, bare, bare_address, _said, repeats),
    }
    title = f"{WATCHERS:,} watchers in one process"
    return uvloop.run(measured("watchers", title, lines, plan.rounds))


async def _registered(some: peer.Peer, name: str) -> None:
    request = wire.RegisterRequest(session_id=some.attached.session_id, tools=[peer.tool(name)])
    await some.stub.Register(request, timeout=PATIENCE_SECONDS)


async def _said(some: peer.Peer, name: str) -> None:
    some.calls.append(peer.call(name, name=name))
    some.flush()


async def _told(server: Child, address: str, change: Change, repeats: int) -> Measured:
    async with _crowd(address, WATCHERS, watch=True) as crowd:
        last, middle, spent = [], [], [_processor_time(server)]
        for number in range(repeats + 1):
            name = f"new_{number}"
            waiting = [asyncio.create_task(_reads_of(one, name)) for one in crowd]
            began_at = time.perf_counter()
            await change(crowd[0], name)
            async with asyncio.timeout(PATIENCE_SECONDS):
                moments = [(moment - began_at) * 1e3 for moment in await asyncio.gather(*waiting)]
            last.append(max(moments))
            middle.append(statistics.median(moments))
            spent.append(_processor_time(server))
        return {  # without the first time, which also reads what came before
            ("to the last that has read of it", "ms"): last[1:],
            ("to half of them", "ms"): middle[1:],
            # Of all times together: the kernel counts in hundredths of a second.
            ("processor time of the server, each watcher", "µs"): [(spent[-1] - spent[1]) * 1e6 / repeats / WATCHERS],
        }


def _processor_time(server: Child) -> float:
    """Returns how many seconds a process has computed, itself and the kernel for it."""
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


async def _reads_of(watcher: peer.Peer, name: str) -> float:
    """Returns when a watcher has read that a tool was added."""
    while (frame := await watcher.read()) is not None:
        told = (listed.tool.name for event in frame.events for listed in event.catalog.added)
        if name in told:
            return time.perf_counter()
    raise RuntimeError("a watcher's stream ended")
