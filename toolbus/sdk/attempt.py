"""Runs one attempt to connect: a channel, the Invoke stream on it, one read loop and one write loop.

`connection.py` handles the fields of each message; `reconnect.py` decides what follows the end of an attempt. Each
attempt has a channel of its own: a channel that failed waits for a backoff of its own, which on loopback is far too
long.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from toolbus.common.cancellation import is_being_cancelled
from toolbus.common.stall import StallWatch
from toolbus.common.text import clean_line, list_names, quote
from toolbus.errors import (
    AlreadyAttached,
    InvalidRequest,
    NotOffered,
    NotPermitted,
    PeerLost,
    ProtocolError,
    RequestError,
    ToolBusError,
    Unauthenticated,
)
from toolbus.protocol.session import Side, State
from toolbus.sdk.connection_settings import MESSAGE_BYTES, ConnectionSettings
from toolbus.sdk.outgoing_calls import PeerSession
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.sdk.credential import Credential


log = logging.getLogger("toolbus.sdk.connection")  # one logger for all of a connection

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # we check the bus's limits ourselves, with an error text
    ("grpc.use_local_subchannel_pool", 1),  # else all peers of a process share one TCP connection and its backoff
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: the keepalive time below decides how many
)
UNANSWERED_MS = 40_000  # after which a stopped bus is given up
KEEPALIVE_MS = 30_000
# Without its event engine, grpc's client often overlooks a connection that is reset right after a write. The next ping
# notices it.
KEEPALIVE_WITHOUT_ENGINE_MS = 2_000

# Statuses that waiting does not fix, and the exceptions for them.
FATAL: dict[grpc.StatusCode, type[ToolBusError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: RequestError,
    grpc.StatusCode.NOT_FOUND: RequestError,
    grpc.StatusCode.PERMISSION_DENIED: NotPermitted,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyAttached,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.UNIMPLEMENTED: NotOffered,
}

# The text of grpcio in place of a stream's status where a write failed before the status was read (grpc issue 36066).
HIDDEN_STATUS = "Internal error from Core"

# Parts of grpc's texts where the two sides do not agree about TLS or its certificates, or where a server just ended.
_UNEXPLAINED = ("Socket closed", "handshake", "erification", "reset", "EOF")

MAX_LATE_SECONDS = 1.0  # of a timer; later means that this process stood still: a suspended machine, a debugger
READ_SECONDS = 0.1  # to read the messages that wait in the socket, where this process was busy
EXPIRY_WARNING_SECONDS = 7 * 86_400.0  # before a key expires

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from grpcio's stubs

Handlers = Mapping[str, Callable[["Attempt", Any], None]]


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        code: the status; OK where the bus ended the stream in good order.
        text: the text of the status.
        seconds: how long the session was live; below 0 where it never was.
        probed: whether the text is the result of a probe of the server.
    """

    code: grpc.StatusCode
    text: str
    seconds: float
    probed: bool = False

    @property
    def cause(self) -> str:
        """The text without the words that grpc puts before it."""
        return self.text.rpartition("last error: ")[2].removeprefix("UNKNOWN: ") or self.code.name

    @property
    def unexplained(self) -> bool:
        """Whether a server is there, and grpc does not know why it ended the connection."""
        if self.code is not grpc.StatusCode.UNAVAILABLE or self.seconds >= 0:
            return False
        return "refused" not in self.text and any(word in self.text for word in _UNEXPLAINED)


class Attempt:
    """One attempt: a channel, the stream on it and its session. Everything runs on the connection's loop."""

    __slots__ = (
        "_allowed",
        "_expiry_timer",
        "_finish",
        "_loop",
        "_settings",
        "_silence_timer",
        "_wake",
        "_writer",
        "all_read",
        "attached",
        "attaching",
        "channel",
        "credential",
        "drain_reason",
        "fatal_error",
        "live_at",
        "metadata",
        "remaining_tools",
        "session",
        "stream",
        "stub",
    )

    def __init__(
        self, settings: ConnectionSettings, loop: asyncio.AbstractEventLoop, credential: Credential | None = None
    ) -> None:
        self._settings = settings
        self._loop = loop
        self.credential = credential
        self.metadata = credential.metadata if credential is not None else ()  # of every RPC
        self.channel = self._open_channel()
        stub: Any = rpc.ToolBusServiceStub(self.channel)
        self.stub = stub
        self.stream: Any = stub.Invoke(metadata=self.metadata)
        self.session: PeerSession = PeerSession(Side.PEER, wire.InvokeRequest, loop.time())
        self.attached: wire.Attached | None = None  # the bus's last answer to an attach
        self.attaching = False  # whether an attach is on its way
        self.remaining_tools: list[list[pb.Tool]] = []  # those that did not fit into the attach, for Register
        self.live_at = 0.0  # when the bus answered the first attach
        self.drain_reason = ""  # the reason of the bus's drain; empty while it sent none
        self.fatal_error: ToolBusError | None = None  # why no further attempt may follow; None where one may
        self.all_read = False  # whether the bus has answered every call that it read; known when the stream has ended
        self._wake = asyncio.Event()  # wakes the writer
        self._finish = False  # whether the writer half-closes once everything is written
        self._writer: asyncio.Task[None] | None = None  # None before the start
        self._silence_timer: asyncio.TimerHandle | None = None  # None before the start
        self._allowed = settings.timings.handshake  # seconds without a message after which the bus counts as lost
        self._expiry_timer: asyncio.TimerHandle | None = None  # None while no key is known to expire
        self.session.outbox.wake = self._wake.set

    def _open_channel(self) -> grpc.aio.Channel:
        bus = self._settings.bus
        if not bus.tls:
            return grpc.aio.insecure_channel(bus.target, options=_options())
        from toolbus.sdk.credential import tls_credentials

        return grpc.aio.secure_channel(bus.target, tls_credentials(self.credential), options=_options())

    @property
    def reached(self) -> bool:
        """Whether this attempt reached the bus, which may then have read the attach."""
        return self.attached is not None or self.channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def over(self) -> bool:
        """Whether its session has ended."""
        return self.session.state is State.CLOSED

    def start(self) -> None:
        """Starts the writer and the handshake timeout."""
        self._writer = self._loop.create_task(self._write())
        self._watch_silence()

    def opened(self, attached: wire.Attached) -> None:
        """Takes the bus's answer to the first attach; from then on the bus has to send a message in each interval."""
        timings = self._settings.timings
        self.live_at = self._loop.time()
        self._allowed = 4 * attached.heartbeat_seconds if attached.heartbeat_seconds > 0 else timings.silence
        self._watch_silence()
        if attached.expires_seconds > 0:
            delay = max(attached.expires_seconds - EXPIRY_WARNING_SECONDS, 0.0)
            self._expiry_timer = self._loop.call_later(delay, self._warn_of_expiry, attached, self.live_at)

    async def read(self, handlers: Handlers, stalls: StallWatch) -> AttemptEnd:
        """Passes each field of each message to its handler until the stream ends; returns how it ended."""
        session, stream, clock = self.session, self.stream, stalls.clock
        code, text = grpc.StatusCode.OK, "the bus ended the stream"
        try:
            while (frame := await stream.read()) is not _EOF:
                if clock() > stalls.due:
                    stalls.notice()
                for field, value in session.receive(frame, self._loop.time()):
                    handlers[field](self, value)
                if session.state is State.LEAVING:
                    self.half_close_if_idle()
        except grpc.aio.AioRpcError as error:
            code, text = status_of(error)
        except ProtocolError as error:
            code, text = grpc.StatusCode.INTERNAL, str(error)
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            code, text = grpc.StatusCode.UNAVAILABLE, "the bus stopped answering"
        seconds = self._loop.time() - self.live_at if self.attached is not None else -1.0
        if code is grpc.StatusCode.OK and self.drain_reason:
            text = f"the bus disconnected this peer: {self.drain_reason}"
            self.all_read = self.drain_reason != "replaced"
        return AttemptEnd(code, text, seconds)

    async def close(self) -> None:
        """Ends writer, stream and channel."""
        for timer in (self._silence_timer, self._expiry_timer):
            if timer is not None:
                timer.cancel()
        self.stream.cancel()
        self.half_close()
        if self._writer is not None:
            # A writer is never cancelled while its stream lives: it ends with the stream. But in grpcio a write that
            # waits for the first metadata never ends if the stream is cancelled before they arrive.
            await asyncio.wait([self._writer], timeout=self._settings.timings.writer)
            self._writer.cancel()
        await self.channel.close(None)

    def half_close(self) -> None:
        """Lets the writer end our direction once everything is written."""
        self._finish = True
        self._wake.set()

    def half_close_if_idle(self) -> None:
        """Half-closes if no call is pending or in flight; for a session that the bus drains."""
        if not self.session.pending and not self.session.in_flight:
            self.half_close()

    def _warn_of_expiry(self, attached: wire.Attached, attached_at: float) -> None:
        """Warns some days before the key of this peer expires."""
        left = max(attached.expires_seconds - (self._loop.time() - attached_at), 0.0)
        place = self.credential.place if self.credential is not None else "this peer"
        log.warning(
            "the key of %s (identity %s) expires in %.1f days: `toolbus keys renew %s` on the machine of the bus, and "
            "copy the file here; it is read whenever this peer attaches",
            *(place, quote(attached.identity), left / 86_400, attached.identity or "NAME"),
        )

    async def _write(self) -> None:
        """Writes the frames of the outbox until `half_close` or the end of the stream; the stream's one writer."""
        outbox, stream = self.session.outbox, self.stream
        try:
            while True:
                frame = outbox.take()
                if frame is not None:
                    await stream.write(frame)
                elif self._finish:
                    await stream.done_writing()
                    return
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except (Exception, asyncio.CancelledError) as error:
            # Of any type: the connection is lost, and the read loop reports why.
            log.debug("writing ended: %r", error)
            stream.cancel()

    def _watch_silence(self) -> None:
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        due = self.session.last_heard + self._allowed
        self._silence_timer = self._loop.call_at(due, self._check_silence, due)

    def _check_silence(self, due: float, *, was_read: bool = False) -> None:
        """Gives up a bus that sends nothing; a bus sends a heartbeat whenever it has nothing else to send.

        Args:
            due: the time for which this call was planned.
            was_read: whether the messages that waited in the socket at that time have been read.
        """
        now, session = self._loop.time(), self.session
        if now - due > MAX_LATE_SECONDS:
            session.restart_pulse(now)
        elif session.last_heard + self._allowed <= now and not was_read:
            again = partial(self._check_silence, now + READ_SECONDS, was_read=True)
            self._silence_timer = self._loop.call_later(READ_SECONDS, again)
            return
        elif session.last_heard + self._allowed <= now:
            if self.attached is not None:
                silent = now - session.last_heard
                log.warning("the bus at %s has sent nothing for %.1f s", self._settings.address, silent)
            self.stream.cancel()
            return
        self._watch_silence()


def _options() -> list[tuple[str, int]]:
    """Returns the options of a channel."""
    without_engine = "-event_engine_client" in os.environ.get("GRPC_EXPERIMENTS", "")
    every = KEEPALIVE_WITHOUT_ENGINE_MS if without_engine else KEEPALIVE_MS
    answer = UNANSWERED_MS - every
    return [
        *OPTIONS,
        ("grpc.keepalive_time_ms", every),
        ("grpc.keepalive_timeout_ms", answer),
        ("grpc.http2.ping_timeout_ms", answer),  # grpc's own is 60 s
    ]


def status_of(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str]:
    """Returns how a stream ended, as a status and its text."""
    if error.details() == HIDDEN_STATUS:
        text = "the stream ended while something was written to it; grpc hides why, the bus's log has the reason"
        return grpc.StatusCode.UNAVAILABLE, text
    return error.code(), error.details() or ""


def error_of(code: grpc.StatusCode, text: str) -> ToolBusError:
    """Returns the exception for a status of the bus, with the bus's text."""
    if code is grpc.StatusCode.UNAVAILABLE:
        return PeerLost(text)
    return FATAL.get(code, ToolBusError)(text or code.name)


# Tracks which of a peer's declared tools the bus has refused or lets wait for a role.
#
# Written on the connection's loop and read from any thread. Each refusal is logged once, until its reason changes.


NO_REASON = "the bus had no room for the reason in its message: `toolbus list --refused` shows it"


@dataclass(frozen=True, slots=True)
class RefusedTool:
    """A declared tool that the bus does not offer.

    Attributes:
        name: as it was declared.
        error: the value, the rule and how to fix it.
        role: the role for which it was declared; None means every role.
        source: the source that declared it; empty except in listings.
    """

    name: str
    error: str
    role: str | None = None
    source: str = ""

    @classmethod
    def from_wire(cls, message: wire.RefusedTool) -> RefusedTool:
        """Copies it out of its message."""
        return cls(message.name, message.error or NO_REASON, message.role or None, message.source)


@dataclass(frozen=True, slots=True)
class WaitingTool:
    """A declared tool that the bus has accepted, but whose role does not exist yet.

    Attributes:
        name: as it was declared.
        role: the role for which it waits.
    """

    name: str
    role: str


_Key = tuple[str, str | None]


class Standing:
    """The refused and waiting tools of one peer.

    Args:
        source: whose tools these are, for the log.
        on_refused: called with the names of newly refused tools, and the reason.
    """

    def __init__(self, source: str, on_refused: Callable[[Sequence[str], str], object]) -> None:
        self._source = source
        self._on_refused = on_refused
        self._refused: dict[_Key, RefusedTool] = {}
        self._waiting: dict[_Key, WaitingTool] = {}
        self._logged: dict[_Key, str] = {}  # the reasons that were logged, across reconnects
        self._logged_waiting: set[_Key] = set()  # the waiting tools that were logged

    def __repr__(self) -> str:
        return f"<Standing refused={len(self._refused)} waiting={len(self._waiting)}>"

    @property
    def refused(self) -> tuple[RefusedTool, ...]:
        """The tools that the bus refused, in the order in which they were declared."""
        return tuple(self._refused.values())

    @property
    def waiting(self) -> tuple[WaitingTool, ...]:
        """The tools that wait for a role."""
        return tuple(self._waiting.values())

    def attached(self, refused: Iterable[wire.RefusedTool], waiting: Iterable[wire.WaitingTool]) -> None:
        """Takes the answer to an attach, which replaces all answers before."""
        self._refused, self._waiting = {}, {}
        self.added(refused, waiting)
        self._logged = {key: each.error for key, each in self._refused.items()}

    def added(self, refused: Iterable[wire.RefusedTool], waiting: Iterable[wire.WaitingTool]) -> None:
        """Takes the answer to a Register, which adds to the answers before."""
        new_refused = [RefusedTool.from_wire(message) for message in refused]
        new_waiting = [WaitingTool(message.name, message.role) for message in waiting]
        self._waiting = {**self._waiting, **{(each.name, each.role): each for each in new_waiting}}
        self._refused = {**self._refused, **{(each.name, each.role): each for each in new_refused}}
        self._report(new_refused)
        self._report_waiting(new_waiting)

    def reviewed(self, event: wire.ToolsReviewed) -> None:
        """Takes an event that the bus has reviewed tools again by itself."""
        moved = {*event.registered, *(each.name for each in event.refused), *(each.name for each in event.waiting)}
        self._refused = {key: each for key, each in self._refused.items() if each.name not in moved}
        self._waiting = {key: each for key, each in self._waiting.items() if each.name not in moved}
        if event.registered:
            names = clean_line(list_names(event.registered))
            log.info("the bus offers tools of %s that it had refused or let wait: %s", self._source, names)
        self.added(event.refused, event.waiting)

    def _report(self, refused: Sequence[RefusedTool]) -> None:
        """Logs new refusals, one warning for each reason, and calls the hook."""
        news: dict[str, list[str]] = {}
        for each in refused:
            key = each.name, each.role
            if self._logged.get(key) != each.error:
                self._logged[key] = each.error
                news.setdefault(each.error, []).append(each.name)
        for error, names in news.items():
            shown, why = clean_line(list_names(names)), clean_line(error)
            log.warning("the bus does not offer %s of source %s: %s", shown, self._source, why)
            self._on_refused(names, error)

    def _report_waiting(self, waiting: Sequence[WaitingTool]) -> None:
        """Logs which tools newly wait for a role, one line for each role."""
        news: dict[str, list[str]] = {}
        for each in waiting:
            if (each.name, each.role) not in self._logged_waiting:
                news.setdefault(each.role, []).append(each.name)
        self._logged_waiting = set(self._waiting)
        for role, names in news.items():
            shown, whose = clean_line(list_names(names)), self._source
            log.warning("%s of source %s waits for role %s, which the bus does not have", shown, whose, quote(role))


# Defines the interface that a connection needs of its peer: the tools to offer, and the reaction to events.


class IncomingCall(Protocol):
    """A call of the bus to this peer."""

    def cancel(self, reason: str) -> None:
        """Cancels it; it still has to be answered while its session lives."""


class AnsweredCall:
    """Stands for a call that was answered at once."""

    def cancel(self, reason: str) -> None:
        """Does nothing: its answer is on its way."""


ANSWERED = AnsweredCall()


class Delegate(Protocol):
    """The tools and events of a peer. Everything runs on the connection's loop and must not block."""

    def tools(self) -> Sequence[pb.Tool]:
        """Returns the tools to declare now."""

    def attached(self, attached: wire.Attached) -> None:
        """Takes the bus's answer to an attach, with the tools that it registered, refused or lets wait."""
        return  # a peer without tools ignores it

    def registered(self, response: wire.RegisterResponse) -> None:
        """Takes the bus's answer to further tools, which did not fit into the attach."""
        return

    def refused(self, names: Sequence[str], reason: str) -> None:
        """Handles that the bus refused a whole declaration of these tools, and perhaps this peer."""
        return

    def event(self, event: wire.Event) -> None:
        """Takes an event of the catalog or about this peer."""

    def notifications_after(self) -> int:
        """Returns the number of the last notification that this peer has; 0 for none."""
        return 0

    def subscriptions(self) -> Sequence[Any]:
        """Returns the events to subscribe to."""
