"""Sends bytes over connections of the lane to the RPCs of a bus: frames that are cut, that lie, that hold no message.

An input is a play of up to 60 steps on four connections, one of which nobody else touches. The bus is the service of
the real one on the core of `BusModel`; only the sockets are missing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

from lab.fuzz.choices import Choices, block_of
from lab.fuzz.core import CoreOnAClock
from lab.fuzz.target import Target, conversations, hold, no_faults
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.audit import Audit
from toolbus.bus.streams.grpc_server import ToolBusService
from toolbus.bus.streams.lane_server import LaneServer, _BusConnection
from toolbus.common.stall import StallWatch
from toolbus.protocol.lane import HEADER, FrameKind
from toolbus.protocol.limits import Timings
from toolbus.protocol.tool import KIB, Limits, Tool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

STEPS = 60
CONNECTIONS = 3  # that an input may use
TURNS = 8  # of the loop, after which everything has been written
LIMITS = Limits(message_bytes=4 * KIB, calls_in_flight=8, waiting_bytes=64 * KIB, sessions=12)
METHODS = (b"Invoke", b"Invoke", b"List", b"Register", b"Unregister", b"Clear", b"Nothing", b"", b"\xff\xfe")
KINDS = (2, 2, 2, 1, 3, 4, 0, 99)
MESSAGES = tuple(
    message.SerializeToString()
    for message in (
        wire.InvokeRequest(attach=wire.Attach(protocol_version=1, source="one", tools=[Tool("echo").to_wire()])),
        wire.InvokeRequest(attach=wire.Attach(protocol_version=1, source="two", subscribe=[wire.SUBSCRIPTION_CATALOG])),
        wire.InvokeRequest(calls=[pb.ToolCall(call_id=each, name="echo", arguments_json="{}") for each in "ab"]),
        wire.InvokeRequest(results=[pb.ToolResult(call_id="1", output_json="7")], drain=wire.Drain(reason="x")),
        wire.InvokeRequest(heartbeat=wire.Heartbeat(sequence=7, from_peer=True), cancels=[pb.ToolCancel(call_id="a")]),
        wire.ListRequest(include_offline=True, page_token="9"),
    )
)
LINE = socket.socketpair()  # what every wire is to those who ask the kernel: open at both ends
ORDER = ("bytes", "frame", "open", "message", "lie", "cut", "half_close", "break", "turn", "slow", "raw_message")


class _Wire(asyncio.Transport):
    """What the bus has written to one peer."""

    def __init__(self) -> None:
        super().__init__({"socket": self})
        self.written = bytearray()
        self.aborted = False
        self.reads = True
        self.resumed: Callable[[], None] = lambda: None  # delivers what came while the bus did not read

    def fileno(self) -> int:
        return LINE[0].fileno()

    def getsockopt(self, *what: Any) -> bytes:
        return struct.pack("=iII", os.getpid(), os.getuid(), os.getgid())  # as the kernel says it of a peer

    def write(self, data: Any) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True
        asyncio.get_running_loop().call_soon(self.resumed)


class _Peer:
    """One connection, and its peer's half."""

    def __init__(self, server: LaneServer, loop: asyncio.AbstractEventLoop) -> None:
        self.wire = _Wire()
        self.wire.resumed = self.read
        self.unread = bytearray()  # what has arrived while the bus does not read
        self.end = _BusConnection(server, Neighbours(), loop)
        self.end.connection_made(self.wire)
        self.waiting = bytearray()  # what is cut off, and sent with what comes next
        self.over = False

    def send(self, data: bytes, keep: int = 0) -> None:
        """Delivers bytes; the last few of them together with those that come next."""
        data = bytes(self.waiting) + data
        self.waiting = bytearray(data[len(data) - keep :] if keep else b"")
        self.unread += data[: len(data) - keep]
        self.read()

    def read(self) -> None:
        """Gives the bus what has arrived, if it reads."""
        if self.unread and self.wire.reads and not self.over:
            data = bytes(self.unread)
            self.unread.clear()
            self.end.data_received(data)

    def break_off(self) -> None:
        if not self.over:
            self.over = True
            self.end.connection_lost(None)

    def check(self) -> tuple[list[bytes], str]:
        """Reads what the bus wrote; returns the messages and the status."""
        messages: list[bytes] = []
        status, start, written = "", 0, bytes(self.wire.written)
        while start < len(written):
            hold(not status, "something follows the status")
            hold(len(written) - start >= HEADER.size, "half of a header was written")
            size, kind = HEADER.unpack_from(written, start)
            payload = written[start + HEADER.size : start + HEADER.size + size]
            hold(len(payload) == size, "a frame was not written as a whole")
            start += HEADER.size + size
            hold(kind in (FrameKind.MESSAGE, FrameKind.STATUS), f"the bus wrote a frame of kind {kind}")
            if kind == FrameKind.STATUS:
                status, _, text = payload.decode().partition("\n")
                hold(status == "OK" or text, f"the status {status} gives no reason")
                hold(status not in ("INTERNAL", "UNKNOWN"), f"the status {status} is a fault of the bus: {text}")
            else:
                messages.append(payload)
        return messages, status


def run(data: bytes) -> None:
    with no_faults():
        asyncio.run(_play(Choices(data)))


async def _play(choose: Choices) -> None:
    loop, core = asyncio.get_running_loop(), CoreOnAClock(limits=LIMITS)
    stalls = StallWatch(1.0, 1.0)
    service = ToolBusService(
        core.dispatcher, core.presence, LIMITS, Timings(), lambda request: wire.RegisterResponse(), stalls
    )
    server = LaneServer(service, LIMITS, Neighbours(), Audit())
    bystander = _Peer(server, loop)
    bystander.send(_frame(FrameKind.OPEN, b"Invoke"))
    attach = wire.Attach(protocol_version=1, source="bystander", tools=[Tool("steady").to_wire()])
    bystander.send(_frame(FrameKind.MESSAGE, wire.InvokeRequest(attach=attach).SerializeToString()))
    peers = [_Peer(server, loop) for _ in range(CONNECTIONS)]
    for _ in range(STEPS):
        if not choose:
            break
        act, index = choose.pick(ORDER), choose.byte() % CONNECTIONS
        if peers[index].over or peers[index].wire.aborted:
            peers[index].break_off()
            peers[index].check()
            peers[index] = _Peer(server, loop)
        await _act(act, peers[index], choose)
    await _turns()
    for peer in peers:
        _, status = peer.check()
        hold(not status or peer.end.over, "input is read behind the status")
        peer.break_off()
    await _turns()
    hold(len(core.presence.sessions) == 1, f"{len(core.presence.sessions) - 1} sessions are left without a connection")
    beat = wire.Heartbeat(sequence=99, from_peer=True)
    bystander.send(_frame(FrameKind.MESSAGE, wire.InvokeRequest(heartbeat=beat).SerializeToString()))
    await _turns()
    messages, status = bystander.check()
    echoed = [wire.InvokeResponse.FromString(each).heartbeat.sequence for each in messages]
    hold(99 in echoed and not status, "the bystander is not answered")
    bystander.break_off()
    await _turns()
    hold(not server.connections and not core.presence.sessions, "a connection is left")
    hold(not core.held, "arguments of calls are still held")


async def _act(act: str, peer: _Peer, choose: Choices) -> None:
    match act:
        case "bytes":
            peer.send(choose.block())
        case "frame":
            peer.send(_frame(choose.pick(KINDS), choose.block()))
        case "open":
            peer.send(_frame(FrameKind.OPEN, choose.pick(METHODS)))
        case "message":
            peer.send(_frame(FrameKind.MESSAGE, choose.pick(MESSAGES)))
        case "lie":  # more or less than what follows
            payload = choose.pick(MESSAGES)
            peer.send(HEADER.pack(choose.pick((0, 1, len(payload) - 1, len(payload) + 3, 4097, 1 << 31)), 2) + payload)
        case "cut":
            message = _frame(FrameKind.MESSAGE, choose.pick(MESSAGES))
            peer.send(message, keep=choose.byte() % len(message))
        case "half_close":
            peer.send(_frame(FrameKind.HALF_CLOSE, b""))
        case "break":
            peer.break_off()
        case "turn":
            await _turns()
        case "slow":
            (peer.end.pause_writing if choose.flag() else peer.end.resume_writing)()
        case "raw_message":
            peer.send(_frame(FrameKind.MESSAGE, choose.block()))


async def _turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def _frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


def step(act: str, peer: int, *rest: int, block: bytes | None = None) -> bytes:
    return bytes([ORDER.index(act), peer, *rest]) + (b"" if block is None else block_of(block))


def seeds() -> Iterator[bytes]:
    """Sessions and RPCs as they should be, the conversations of the vectors, and each way to break a frame."""
    plugin = step("open", 0, 0) + step("message", 0, 0)
    host = step("open", 1, 0) + step("message", 1, 1)
    calls = step("message", 1, 2) + step("turn", 0)
    yield plugin + host + calls + step("message", 0, 3) + step("turn", 0) + step("half_close", 1)
    yield plugin + host + calls + step("break", 0) + step("turn", 0) + step("message", 1, 4)
    yield plugin + host + step("slow", 1, 1) + calls + step("break", 0) + step("turn", 0) + step("slow", 1, 0)
    yield plugin + step("cut", 0, 2, 7) + step("turn", 0) + step("message", 0, 4)
    yield step("open", 0, 2) + step("message", 0, 5) + step("turn", 0) + step("message", 0, 5)
    for number in range(6):
        yield (
            plugin
            + step("lie", 0, 2, number)
            + step("message", 0, 2)
            + step("turn", 0)
            + step("bytes", 0, block=b"x" * 9)
        )
    for number in range(len(METHODS)):
        yield step("open", 2, number) + step("raw_message", 2, block=b"\x0a\x05") + step("turn", 0)
    for number in range(len(KINDS)):
        yield plugin + step("frame", 0, number, block=b"\xff\xff\xff") + step("turn", 0)
    for messages in conversations("bus.jsonl", wire.InvokeRequest):
        if play := b"".join(step("raw_message", 0, block=each) for each in messages if len(each) < 500):
            yield step("open", 0, 0) + play + step("turn", 0)


TARGET = Target(
    "lane", "a reason for each end, nothing left over, bystanders untouched, whatever bytes come", run, seeds
)
