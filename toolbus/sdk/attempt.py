"""What a connection is made of: its settings, the duties of its peer, and one attempt to be connected.

Values and plain state; `connection.py` drives them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from toolbus.errors import (
    Code,
    InvalidRequest,
    NotOffered,
    NotPermitted,
    PeerLost,
    RequestError,
    SetupError,
    Stage,
    ToolBusError,
)
from toolbus.sdk.outgoing_calls import PeerSession
from toolbus.session import Side
from toolbus.tool import MAX_INSTANCE, MIB, PROTOCOL_VERSIONS, SOURCE, CallError, Result
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.sdk.connection import Connection

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1:48930"
MESSAGE_BYTES = 16 * MIB  # what we receive, and what the bus receives unless it says otherwise
ATTACH_BYTES = 12 * MIB  # tools in one message; the rest follows by Register

# Back-off with full jitter. The bus is on this machine: a restart should be over a second after it listens.
PAUSE_FIRST = 0.05
PAUSE_MOST = 0.8
PAUSE_REFUSED = 10.0  # where the bus is there and says no

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # the bus's limits are checked by us, in words
    ("grpc.use_local_subchannel_pool", 1),  # else all peers of a process share one TCP connection and its back-off
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it a stopped bus goes unnoticed for 60 s (design.md 4)
)

# Statuses that waiting does not cure, and what they are raised as.
FATAL: dict[grpc.StatusCode, type[ToolBusError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: RequestError,
    grpc.StatusCode.NOT_FOUND: RequestError,
    grpc.StatusCode.PERMISSION_DENIED: NotPermitted,
    grpc.StatusCode.UNAUTHENTICATED: NotPermitted,
    grpc.StatusCode.UNIMPLEMENTED: NotOffered,
}

# What grpcio says in the place of a stream's status where a write failed before that was read (grpc issue 36066).
HIDDEN = "Internal error from Core"


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """What a connection is told once.

    Attributes:
        address: ``HOST:PORT`` or ``unix:PATH``; empty means TOOLBUS_ADDRESS, then 127.0.0.1:48930.
        source: whose tools and calls these are.
        instance: tells the sessions of a source apart; empty draws one, which stays for all attaches.
        max_in_flight: calls in flight in each direction; 0 means the bus's 256.
        qualified: whether the tools are listed as ``source:name``.
        token: proves the right to the source; empty means TOOLBUS_TOKEN.
        notices: what an operator should know about the source, a sentence each.
    """

    source: str
    address: str = ""
    instance: str = ""
    max_in_flight: int = 0
    qualified: bool = False
    token: str = field(default="", repr=False)
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        address = self.address or os.environ.get("TOOLBUS_ADDRESS") or ADDRESS
        object.__setattr__(self, "address", address)
        object.__setattr__(self, "token", self.token or os.environ.get("TOOLBUS_TOKEN", ""))
        object.__setattr__(self, "instance", self.instance or secrets.token_hex(16))
        host, _, port = address.rpartition(":")
        if not (address.startswith("unix:") and len(address) > 5) and not (host and port.isdecimal()):
            raise SetupError(f"the bus's address is {address!r}, it must be HOST:PORT or unix:PATH")
        if not SOURCE.fullmatch(self.source):
            raise SetupError(f"source {self.source[:140]!r} breaks the rule [A-Za-z0-9_.:-]{{1,128}}: choose another")
        if len(self.instance) > MAX_INSTANCE:
            raise SetupError(f"instance has {len(self.instance)} characters, more than {MAX_INSTANCE}: shorten it")
        if not 0 <= self.max_in_flight <= 4096:
            raise SetupError(f"max_in_flight is {self.max_in_flight}, it must be from 0 (the default) to 4096")


class IncomingCall(Protocol):
    """A call that the bus asked of this peer."""

    def cancel(self, reason: str) -> None:
        """Takes it back; it still has to be answered while its session lives."""


class Delegate(Protocol):
    """What a peer does besides calling. Everything runs on the connection's loop and must not block."""

    def declared(self) -> Sequence[pb.Tool]:
        """Returns the tools to declare now."""

    def take(self, connection: Connection, session: PeerSession, call: pb.ToolCall) -> IncomingCall:
        """Begins to answer a call, later and once, by ``connection.answer``; nothing of ``call`` may be kept."""

    def attached(self, refused: Sequence[str], why: str) -> None:
        """Hears the bus's answer to a declaration: the tools that it did not take, and why; none where it took all."""
        return  # a peer without tools has nothing to hear

    def refused(self, names: Sequence[str], why: str) -> None:
        """Hears that the bus refused a whole declaration, of these tools, and with it perhaps this peer."""
        return

    def event(self, event: wire.Event) -> None:
        """Hears what happened to the catalog or to this peer."""

    def subscriptions(self) -> Sequence[Any]:
        """Returns what to subscribe to."""


class Link:
    """One attempt: a channel, the stream on it and its session."""

    __slots__ = (
        "all_read",
        "attached",
        "attaching",
        "channel",
        "draining",
        "finish",
        "live_at",
        "rest",
        "session",
        "stream",
        "stub",
        "wake",
    )

    def __init__(self, address: str, now: float) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        stub: Any = rpc.ToolBusServiceStub(self.channel)
        self.stub = stub
        self.stream: Any = stub.Invoke()
        self.session: PeerSession = PeerSession(Side.PEER, wire.InvokeRequest, now)
        self.wake = asyncio.Event()  # tells the writer to look again
        self.session.outbox.wake = self.wake.set
        self.attached: wire.Attached | None = None  # the bus's last answer to an attach
        self.attaching = False  # whether an attach is on its way
        self.rest: list[list[pb.Tool]] = []  # tools that follow by Register
        self.live_at = 0.0  # when the bus answered the first attach
        self.draining = ""  # the reason of the bus's drain; empty while it sent none
        self.all_read = False  # whether the bus has answered every call that it read; known when the stream has ended
        self.finish = False  # whether the writer ends our direction

    async def write(self) -> None:
        """Writes whatever waits, until told to finish or the stream has ended; the stream's one writer."""
        outbox, stream = self.session.outbox, self.stream
        try:
            while True:
                frame = outbox.take()
                if frame is not None:
                    await stream.write(frame)
                elif self.finish:
                    await stream.done_writing()
                    return
                else:
                    self.wake.clear()
                    await self.wake.wait()
        except (Exception, asyncio.CancelledError) as problem:
            # Of whatever type: the peer is gone, and whoever reads knows or will know why.
            log.debug("writing ended: %r", problem)
            stream.cancel()

    def end_direction(self) -> None:
        """Has the writer half-close once everything is written."""
        self.finish = True
        self.wake.set()


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended.

    Attributes:
        code: the status; OK where the bus ended the stream in good order.
        text: the status's sentence.
        seconds: how long the session was live; below 0 where it never was.
    """

    code: grpc.StatusCode
    text: str
    seconds: float

    @property
    def cause(self) -> str:
        """The sentence without what grpc wraps round it."""
        return self.text.rpartition("last error: ")[2].removeprefix("UNKNOWN: ") or self.code.name

    def pause(self, attempt: int) -> float:
        """Returns how long to wait before the next attempt, in seconds, by chance."""
        most, first = PAUSE_MOST, PAUSE_FIRST
        if self.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK):
            most, first = PAUSE_REFUSED, 10 * PAUSE_FIRST
        return random.uniform(0.0, min(most, first * 2 ** min(attempt, 20)))


def status_of(problem: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str]:
    """Returns how a stream ended, as a status and its sentence."""
    if problem.details() == HIDDEN:
        why = "the stream ended while something was written to it; grpc hides why, the bus's log has the reason"
        return grpc.StatusCode.UNAVAILABLE, why
    return problem.code(), problem.details() or ""


def attach_of(settings: ConnectionSettings, tools: Sequence[pb.Tool], subscriptions: Sequence[Any]) -> wire.Attach:
    """Returns an attach with these tools."""
    return wire.Attach(
        protocol_version=PROTOCOL_VERSIONS[-1],
        source=settings.source,
        instance=settings.instance,
        tools=tools,
        max_in_flight=settings.max_in_flight,
        max_message_bytes=MESSAGE_BYTES,
        qualified=settings.qualified,
        subscribe=subscriptions,
        token=settings.token,
        notices=settings.notices,
    )


def portions(tools: Sequence[pb.Tool]) -> list[list[pb.Tool]]:
    """Cuts tools into portions that each fit into one message; at least one, which may be empty."""
    portions: list[list[pb.Tool]] = [[]]
    filled = 0
    for tool in tools:
        size = tool.ByteSize() + 8
        if filled + size > ATTACH_BYTES and portions[-1]:
            portions.append([])
            filled = 0
        portions[-1].append(tool)
        filled += size
    return portions


def fitting(result: Result, size: int, most: int) -> Result:
    """Returns a result, or in its place the error that it is too large: sent, it could end the whole stream."""
    exact = size - len(result.output_json) + len(result.output_json.encode("utf-8", "replace"))
    if exact <= most:
        return result
    text = (
        f"the result has {exact} bytes, more than the limit result_bytes = {most}: have the tool return less, or a link"
    )
    error = CallError(Code.RESULT_TOO_LARGE, text, Stage.ACCEPTED, limit=("result_bytes", float(most)))
    return Result(result.call_id, is_error=True, error=error)


def message_of(result: Result) -> pb.ToolResult:
    """Returns a result's wire form, or that of an error where one of its texts is none."""
    try:
        return result.to_wire()
    except ValueError as problem:  # a lone surrogate
        error = CallError(Code.INTERNAL, f"the tool's result is no text: {problem}", Stage.ACCEPTED)
        return Result(result.call_id, is_error=True, error=error).to_wire()


def error_of(code: grpc.StatusCode, text: str) -> ToolBusError:
    """Returns what a status of the bus is raised as, with the bus's sentence."""
    if code is grpc.StatusCode.UNAVAILABLE:
        return PeerLost(text)
    return FATAL.get(code, ToolBusError)(text or code.name)
