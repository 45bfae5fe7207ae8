"""Looks at a bus from outside while it is busy: its health in every form, and the memory of its process."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

PAUSE = 0.1
BEAT = 0.01
COMMAND_PAUSE = 5.0
PATIENCE = 10.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Look:
    """One question about health.

    Attributes:
        at: when it was asked, in seconds from the beginning.
        said: the answer, or what went wrong.
    """

    what: str
    at: float
    seconds: float
    said: str


def turns(pid: int) -> tuple[float, float]:
    """Returns how many seconds a process's first thread, its loop's, has run, and has waited for a processor."""
    ran, waited, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text().split())
    return ran / 1e9, waited / 1e9


def stretched(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Returns how many times as long as alone on the machine a process took for its work, by its turns."""
    return 1.0 + (after[1] - before[1]) / max(after[0] - before[0], 1e-3)


class Watch:
    """Asks until it is cancelled.

    Args:
        sources: those whose health is asked for.
        http: the gateway's URL.
    """

    def __init__(self, grpc_address: str, http: str, sources: tuple[str, ...], pid: int) -> None:
        self._address = grpc_address
        self._http = http
        self._services = ("", *(f"toolbus.source.{source}" for source in sources))
        self._bus = psutil.Process(pid)
        self.began_at = time.monotonic()
        self.looks: list[Look] = []
        self.memory: list[tuple[float, float]] = []  # (when, MiB)
        self.turns: list[tuple[float, float, float]] = []  # (when, seconds that the bus ran, that it waited to run)
        self.late: list[tuple[float, float]] = []  # (when, how many seconds late the machine let this process run)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began_at

    def stretch(self, begin: float, end: float) -> float:
        """How many times as long as alone on the machine the bus took for its work."""
        within = [turn for turn in self.turns if begin <= turn[0] < end]
        if len(within) < 2:
            return 1.0
        return stretched(within[0][1:], within[-1][1:])

    async def settled(self, growth: float, seconds: float = 5.0) -> None:
        """Waits until the bus weighs at most so much more than at first, or so long."""
        ends_at = self.now + seconds
        while self.now < ends_at and (not self.memory or self.memory[-1][1] - self.memory[0][1] > growth):
            await asyncio.sleep(PAUSE)

    async def run(self) -> None:
        """Asks in every way, each beside the others."""
        async with (
            grpc.aio.insecure_channel(self._address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session,
            asyncio.TaskGroup() as group,
        ):
            stub = health_pb2_grpc.HealthStub(channel)
            for service in self._services:
                group.create_task(self._repeat(f"Check {service!r}", PAUSE, functools.partial(_check, stub, service)))
            for path in ("/healthz", "/readyz"):
                group.create_task(self._repeat(path, PAUSE, functools.partial(_get, session, self._http + path)))
            group.create_task(self._repeat("toolbus health", COMMAND_PAUSE, self._command))
            group.create_task(self._weigh())
            group.create_task(self._beat())

    async def _repeat(self, what: str, pause: float, ask: Callable[[], Awaitable[str]]) -> None:
        while True:
            began = self.now
            try:
                said = await ask()
            except grpc.aio.AioRpcError as problem:
                said = problem.code().name
            except (aiohttp.ClientError, OSError, TimeoutError) as problem:
                said = type(problem).__name__
            self.looks.append(Look(what, began, self.now - began, said))
            await asyncio.sleep(pause)

    async def _command(self) -> str:
        command = (sys.executable, "-m", "toolbus.cli", "health", "", "--bus", self._address)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            return f"exit {await process.wait()}"
        finally:
            if process.returncode is None:
                process.kill()

    async def _beat(self) -> None:
        while True:
            began = self.now
            await asyncio.sleep(BEAT)
            self.late.append((began, max(self.now - began - BEAT, 0.0)))

    async def _weigh(self) -> None:
        while True:
            self.memory.append((self.now, self._bus.memory_info().rss / MIB))
            self.turns.append((self.now, *turns(self._bus.pid)))
            await asyncio.sleep(PAUSE)


async def _check(stub: health_pb2_grpc.HealthStub, service: str) -> str:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


async def _get(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        return str(answer.status)
