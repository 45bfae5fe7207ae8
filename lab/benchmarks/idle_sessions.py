"""Measures what sessions without calls cost a bus, on the lane and over gRPC: processor time and memory."""

from __future__ import annotations

import asyncio
import functools
import socket
import time

from lab.benchmarks.contest import Plan
from lab.benchmarks.crowds import MEMORY, crowd_of, open_files, resident
from lab.benchmarks.facts import Column, Fact, Line, Measured, measured
from lab.benchmarks.large_reads import spent
from lab.load import peer
from lab.stage import Stage
from toolbus.protocol.lane import FrameKind, LaneConnection, lane_names
from toolbus.protocol.limits import MIB
from toolbus.v1 import tool_bus_service_pb2 as wire

ON_LANE, OVER_GRPC = 5_000, 1_000
AT_ONCE = 50  # attaches at a time
SETTLE_SECONDS = 12.0  # more than from one heartbeat to the next
WATCHED_SECONDS = 20.0
CORE: Column = ("processor time of the bus, of a core", "%")
EACH: Column = ("the same for each session, in ten seconds", "µs")


class _IdlePeer(LaneConnection):
    """A peer on the lane that attaches and echoes heartbeats."""

    def __init__(self, source: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(16 * MIB, loop)
        self.attached: asyncio.Future[None] = loop.create_future()
        self._source = source

    def connected(self) -> None:
        self.write(FrameKind.OPEN, b"Invoke")
        tools = [peer.tool(self._source.replace("-", "_"))]
        self._send(wire.InvokeRequest(attach=wire.Attach(protocol_version=1, source=self._source, tools=tools)))

    def frame(self, kind: int, payload: bytes) -> None:
        if kind != FrameKind.MESSAGE:
            return
        response = wire.InvokeResponse.FromString(payload)
        if response.HasField("attached"):
            self.attached.set_result(None)
        if response.HasField("heartbeat"):
            self._send(wire.InvokeRequest(heartbeat=wire.Heartbeat(sequence=response.heartbeat.sequence)))

    def _send(self, request: wire.InvokeRequest) -> None:
        self.write(FrameKind.MESSAGE, request.SerializeToString())

    def refuse(self, status: str, text: str) -> None:
        self.abort()


def idle(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Attaches sessions with a tool each, and lets them be."""
    lines: dict[str, Line] = {
        f"{ON_LANE:,} on the lane": functools.partial(_on_lane, plan),
        f"{OVER_GRPC:,} over gRPC": functools.partial(_over_grpc, plan),
    }
    return measured("idle", "Idle sessions", lines, plan.rounds)


async def _on_lane(plan: Plan) -> Measured:
    open_files(ON_LANE)
    with plan.stage() as stage:
        bus, address, _ = stage.bus()
        before, loop, peers = await resident(bus), asyncio.get_running_loop(), list[_IdlePeer]()
        (name,) = lane_names(address)
        for number in range(ON_LANE):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(name)
            connection.setblocking(False)
            some = _IdlePeer(f"idle-{number}", loop)
            await loop.create_unix_connection(lambda some=some: some, sock=connection)  # type: ignore[misc]
            peers.append(some)
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.gather(*(each.attached for each in peers[-AT_ONCE:]))
        held = await resident(bus) - before
        found = await _watched(bus.pid, ON_LANE, held)
        for some in peers:
            some.abort()
        await asyncio.sleep(1.0)  # until their sockets are closed: the next child is read by select
        return found


async def _over_grpc(plan: Plan) -> Measured:
    open_files(OVER_GRPC)
    with plan.stage() as stage:
        bus, address, _ = stage.bus()
        before = await resident(bus)
        async with crowd_of(address, OVER_GRPC):
            return await _watched(bus.pid, OVER_GRPC, await resident(bus) - before)


async def _watched(pid: int, count: int, held: int) -> Measured:
    await asyncio.sleep(SETTLE_SECONDS)
    before, began = spent(pid), time.perf_counter()
    await asyncio.sleep(WATCHED_SECONDS)
    share = (spent(pid) - before) / (time.perf_counter() - began)
    return {CORE: [100 * share], EACH: [share * 10 / count * 1e6], MEMORY: [held / count / 1e3]}
