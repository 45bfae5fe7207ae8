"""Measures how long a registration over HTTP takes while the bus carries calls over gRPC."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

import aiohttp
import uvloop

from lab.benchmarks.contest import Plan
from lab.benchmarks.contestants import PLUGIN
from lab.benchmarks.facts import Fact
from lab.load.callbacks import declaration, register
from lab.load.schedule import Phase, Schedule, let_begin
from lab.stage import LOOK_SECONDS, LOOPBACK, Stage

REGISTRATIONS = 500  # of one round: its p99 is the sixth from the top
RATE = 500  # calls a second beside them
MAX_SECONDS = 3600.0  # of all rounds
AIM_MS = 50.0  # a client of the contract waits 5 s


def register_busy(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Times registrations one after another, beside calls over gRPC."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bus, grpc, http = stage.bus("--data-dir", folder, http=LOOPBACK)
        _, callback_url = PLUGIN(stage, plan)
        stage.module("load.plugin", grpc).line()
        here = Path(stage.folder())
        stage.module("overload.hosts", "stream", grpc, str(here), "host").line()
        let_begin(here, "host", f"{time.monotonic()} {Schedule([Phase(RATE, MAX_SECONDS)])}")
        rounds = [uvloop.run(_timed(http, callback_url, f"{n}")) for n in range(max(1, repeats // 2))]
        bus.end()  # before its directory is removed
    what = f"POST /api/tools/register, persisted, while {RATE} calls/s run over gRPC"
    places = (("p50", REGISTRATIONS // 2, None), ("p99", REGISTRATIONS * 99 // 100, AIM_MS), ("slowest", -1, None))
    return tuple(
        Fact("register_busy", f"{what}: {label} of {REGISTRATIONS}", "ms", aim, tuple(each[place] for each in rounds))
        for label, place, aim in places
    )


async def _timed(http: str, callback_url: str, mark: str) -> list[float]:
    """Registers new tools one after another; returns how long each took, in milliseconds and in order of size."""
    bodies = [declaration(callback_url, f"tool_{mark}_{n}") for n in range(REGISTRATIONS)]
    async with aiohttp.ClientSession(http) as session:
        while (before := await _answered(session)) < RATE:
            await asyncio.sleep(LOOK_SECONDS)
        began_at = time.perf_counter()
        samples = []
        for body in bodies:
            sent_at = time.perf_counter()
            await register(session, body)
            samples.append((time.perf_counter() - sent_at) * 1e3)
        seconds = time.perf_counter() - began_at
        carried = (await _answered(session) - before) / seconds
    if carried < RATE * 0.9:
        raise RuntimeError(f"the bus carried {carried:.0f} calls/s beside the registrations instead of {RATE}")
    return sorted(samples)


async def _answered(session: aiohttp.ClientSession) -> int:
    """Returns how many calls the bus has answered."""
    async with session.post("/api/bus/stats", json={}) as answer:
        outcomes = json.loads(await answer.read())["output"]["outcomes"]
        return sum(outcomes.values())
