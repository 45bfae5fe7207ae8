"""Probes a bus from outside while it is busy: its health in every form, and the memory of its process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lab.child import READY_SECONDS, Child
from lab.judge import Verdict, at_most, figure
from lab.load.workload import quantile
from lab.stage import until_async
from toolbus.protocol.tool import MIB

PAUSE = 0.1
BEAT = 0.01
COMMAND_PAUSE = 5.0
COMMAND = "toolbus health"
PROBE_SECONDS = 10.0
PEAK_MIB = 256.0  # that a bus may grow during the load: what `held_bytes` lets it hold
GROWTH_MIB = 48.0  # that it may weigh more after the load than before
HEALTHY = frozenset({"SERVING", "200", "exit 0"})


@dataclass(frozen=True, slots=True)
class Look:
    """One probe of health.

    Attributes:
        at: when it began, in seconds from the beginning of the load.
        answer: the status, or what went wrong.
    """

    what: str
    at: float
    seconds: float
    answer: str


class Watch:
    """Probes until it is cancelled.

    Args:
        sources: those whose health is probed.
        http: the gateway's URL.
    """

    def __init__(self, bus: Child, grpc_address: str, http: str, sources: tuple[str, ...]) -> None:
        self._address = grpc_address
        self._http = http
        self._services = ("", *(f"toolbus.source.{source}" for source in sources))
        self._bus = bus
        self.began_at = time.monotonic()
        self.looks: list[Look] = []
        self.memory: list[tuple[float, float]] = []  # (when, MiB)
        self.turns: list[tuple[float, float, float]] = []  # (when, seconds that the bus ran, that it waited to run)
        self.late: list[tuple[float, float]] = []  # (when, how many seconds late the machine let this process run)

    @property
    def now(self) -> float:
        """Seconds since the beginning of the load."""
        return time.monotonic() - self.began_at

    def pace(self, begin: float, end: float) -> list[Verdict]:
        """Returns how busy the machine was with others: what makes every time of this run longer."""
        late = [seconds for at, seconds in self.late if begin <= at < end]
        within = [turn for turn in self.turns if begin <= turn[0] < end]
        ran, waited = (within[-1][part] - within[0][part] if within else 0.0 for part in (1, 2))
        return [
            figure("the machine woke a metronome late, p99", quantile(late, 0.99) * 1e3, "ms"),
            figure("the bus's work took, times as long as alone", 1.0 + waited / max(ran, 1e-3), "×"),
        ]

    def growth(self, calm_until: float, peak: float = PEAK_MIB, for_good: float = GROWTH_MIB) -> list[Verdict]:
        """Judges what the bus weighs, compared with the calm before the load."""
        begin = min(mib for at, mib in self.memory if at < calm_until)
        highest, end = max(mib for _, mib in self.memory), self.memory[-1][1]
        return [
            at_most("the bus grew during the load", peak, highest - begin, "MiB"),
            at_most("the bus grew for good", for_good, end - begin, "MiB"),
        ]

    async def settled(self, growth: float, seconds: float = 5.0) -> None:
        """Waits until the bus weighs at most so much more than at first, or so long."""
        await until_async(lambda: self.memory and self.memory[-1][1] - self.memory[0][1] <= growth, seconds, PAUSE)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probes in every way, each beside the others."""
        watching = asyncio.create_task(self._run())
        try:
            await until_async(lambda: self.memory and self.looks, READY_SECONDS)
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _run(self) -> None:
        async with (
            grpc.aio.insecure_channel(self._address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PROBE_SECONDS)) as session,
            asyncio.TaskGroup() as group,
        ):
            stub = health_pb2_grpc.HealthStub(channel)
            for service in self._services:
                group.create_task(self._repeat(f"Check {service!r}", PAUSE, functools.partial(_check, stub, service)))
            for path in ("/healthz", "/readyz"):
                group.create_task(self._repeat(path, PAUSE, functools.partial(_get, session, self._http + path)))
            group.create_task(self._repeat(COMMAND, COMMAND_PAUSE, self._command))
            group.create_task(self._weigh())
            group.create_task(self._beat())

    async def _repeat(self, what: str, pause: float, probe: Callable[[], Awaitable[str]]) -> None:
        while True:
            began = self.now
            try:
                answer = await probe()
            except grpc.aio.AioRpcError as error:
                answer = error.code().name
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                answer = type(error).__name__
            self.looks.append(Look(what, began, self.now - began, answer))
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
            self.memory.append((self.now, self._bus.resident_bytes / MIB))
            # What the first thread of the bus, its loop's, has run, and has waited for a processor; in nanoseconds.
            ran, waited, _ = map(int, Path(f"/proc/{self._bus.pid}/schedstat").read_text().split())  # noqa: ASYNC240
            self.turns.append((self.now, ran / 1e9, waited / 1e9))
            await asyncio.sleep(PAUSE)


async def _check(stub: health_pb2_grpc.HealthStub, service: str) -> str:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PROBE_SECONDS)
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


async def _get(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as response:
        return str(response.status)
