"""Measures registrations over HTTP: how long one takes, idle and under traffic, and what ten thousand of them need.

Every function starts a bus and peers of its own, and returns its facts; its name repeats all of them.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time

import aiohttp
import uvloop

from lab.benchmarks.contest import LOOPBACK, Plan
from lab.benchmarks.contestants import PLUGIN
from lab.benchmarks.facts import Fact, microseconds
from lab.load.callbacks import declaration, register
from lab.stage import Stage

REGISTRATIONS = 500  # of one round: its p99 is the sixth from the top
RATE = 500  # calls a second beside them
MANY = 10_000
SOURCES = 100  # of the many
WARM = 100  # registrations before memory is read for the first time, so that imports do not show
AT_ONCE = 8
SETTLE_SECONDS = 1.0
AIM_MS = 50.0  # a client of the contract waits 5 s


def register_idle(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Times registrations one after another with a bus that does nothing else."""
    return _register(stage, plan, repeats, 0)


def register_busy(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Times registrations one after another with a bus that carries calls over gRPC meanwhile."""
    return _register(stage, plan, repeats, RATE)


def _register(stage: Stage, plan: Plan, repeats: int, rate: int) -> tuple[Fact, ...]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bus, grpc, http = plan.bus(stage, "--data-dir", folder, http=LOOPBACK)
        _, callback_url = PLUGIN(stage, plan)
        if rate:
            stage.module("load.plugin", grpc).line()
            stage.module("load.stream_host", grpc, "--rate", str(rate)).line()
        rounds = [uvloop.run(_timed(http, callback_url, f"{n}", rate)) for n in range(max(1, repeats // 2))]
        bus.end()  # before its directory goes
    name = "register_busy" if rate else "register_idle"
    beside = f"while {rate} calls/s run over gRPC" if rate else "idle"
    places = (("p50", REGISTRATIONS // 2, None), ("p99", REGISTRATIONS * 99 // 100, AIM_MS), ("slowest", -1, None))
    return tuple(
        Fact(
            name,
            f"POST /api/tools/register, persisted, {beside}: {label} of {REGISTRATIONS}",
            "ms",
            aim,
            tuple(each[place] for each in rounds),
        )
        for label, place, aim in places
    )


async def _timed(http: str, callback_url: str, mark: str, rate: int) -> list[float]:
    """Registers new tools one after another; returns how long each took, in milliseconds and in order of size."""
    bodies = [declaration(callback_url, f"tool_{mark}_{n}") for n in range(REGISTRATIONS)]
    async with aiohttp.ClientSession(http) as session:
        before, began_at = await _answered(session), time.perf_counter()
        samples = []
        for body in bodies:
            sent_at = time.perf_counter()
            await register(session, body)
            samples.append((time.perf_counter() - sent_at) * 1e3)
        seconds = time.perf_counter() - began_at
        carried = (await _answered(session) - before) / seconds
    if carried < rate * 0.9:
        raise RuntimeError(f"the bus carried {carried:.0f} calls/s beside the registrations instead of {rate}")
    return sorted(samples)


async def _answered(session: aiohttp.ClientSession) -> int:
    """Returns how many calls the bus has answered."""
    async with session.post("/api/bus/stats", json={}) as answer:
        outcomes = json.loads(await answer.read())["output"]["outcomes"]
        return sum(outcomes.values())


def many_kept(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Registers ten thousand callbacks with a bus that persists them: memory, lists, and its next starts."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        persistence = ("--data-dir", folder)
        facts = _many(stage, plan, repeats, "many_kept", *persistence)
        starts = []
        for _ in range(max(1, repeats // 3)):
            began_at = time.monotonic()
            bus, _, http = plan.bus(stage, *persistence, http=LOOPBACK)
            starts.append((time.monotonic() - began_at) * 1e3)
            uvloop.run(_count(http))
            bus.end()
    sentence = f"start of a bus that restores {MANY:,} callbacks, to its ready line"
    return (*facts, Fact("many_kept", sentence, "ms", None, tuple(starts)))


def many_ephemeral(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Registers ten thousand callbacks with a bus that persists nothing: memory and lists."""
    return _many(stage, plan, repeats, "many_ephemeral", "--ephemeral")


def _many(stage: Stage, plan: Plan, repeats: int, name: str, *persistence: str) -> tuple[Fact, ...]:
    bus, _, http = plan.bus(stage, *persistence, http=LOOPBACK)
    _, callback_url = PLUGIN(stage, plan)
    uvloop.run(_register_all(http, callback_url, range(WARM)))
    empty = bus.settled_bytes(SETTLE_SECONDS)
    uvloop.run(_register_all(http, callback_url, range(WARM, WARM + MANY)))
    full = bus.settled_bytes(SETTLE_SECONDS)
    first, again = uvloop.run(_listed(http, callback_url, repeats))
    listed = bus.settled_bytes(SETTLE_SECONDS)
    bus.end()
    what = f"{MANY:,} callbacks, {persistence[0]}"
    return tuple(
        Fact(name, f"{what}: {sentence}", unit, None, samples)
        for sentence, unit, samples in (
            ("resident memory before", "MB", (empty / 1e6,)),
            ("resident memory with them", "MB", (full / 1e6,)),
            ("resident memory for each", "kB", ((full - empty) / MANY / 1e3,)),
            ("resident memory once they were listed", "MB", (listed / 1e6,)),
            ("GET /api/tools after a change", "ms", first),
            ("GET /api/tools again", "ms", again),
        )
    )


async def _register_all(http: str, callback_url: str, numbers: range) -> None:
    waiting = iter(numbers)
    async with aiohttp.ClientSession(http) as session:

        async def register_some() -> None:
            for number in waiting:
                await register(session, declaration(callback_url, f"tool_{number}", f"bench-{number % SOURCES}"))

        await asyncio.gather(*(register_some() for _ in range(AT_ONCE)))


async def _listed(http: str, callback_url: str, repeats: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Times lists right after a change, and the ones after those."""
    first, again = [], []
    async with aiohttp.ClientSession(http) as session:
        for number in range(repeats):
            await register(session, declaration(callback_url, f"change_{number}"))
            first.append(await microseconds(lambda _: _list(session), 1) / 1e3)
            again.append(await microseconds(lambda _: _list(session), 5) / 1e3)
    return tuple(first), tuple(again)


async def _list(session: aiohttp.ClientSession) -> bytes:
    async with session.get("/api/tools") as answer:
        return await answer.read()


async def _count(http: str) -> None:
    """Fails where a bus does not offer what it has persisted."""
    async with aiohttp.ClientSession(http) as session:
        roles = json.loads(await _list(session))["tools_by_role"]
    fewest = min(map(len, roles.values()))
    if fewest < MANY:
        raise RuntimeError(f"after its restart the bus offers {fewest:,} tools instead of {MANY:,}")
