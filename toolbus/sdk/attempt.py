"""Runs one attempt to connect: a transport, the Invoke stream on it, and its session.

`connection.py` handles the fields of each message; `reconnect.py` decides what follows the end of an attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

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
from toolbus.sdk.connection_settings import ConnectionSettings
from toolbus.sdk.outgoing_calls import PeerSession
from toolbus.sdk.transport import LaneTransport, PeerTransport, connect_lane
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.sdk.credential import Credential


log = logging.getLogger("toolbus.sdk.connection")  # one logger for all of a connection

# Statuses that waiting does not fix, by name, and the exceptions for them.
FATAL: dict[str, type[ToolBusError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "FAILED_PRECONDITION": RequestError,
    "NOT_FOUND": RequestError,
    "PERMISSION_DENIED": NotPermitted,
    "ALREADY_EXISTS": AlreadyAttached,
    "UNAUTHENTICATED": Unauthenticated,
    "UNIMPLEMENTED": NotOffered,
}

# Parts of grpc's texts where the two sides do not agree about TLS or its certificates, or where a server just ended.
_UNEXPLAINED = ("Socket closed", "handshake", "erification", "reset", "EOF")

MAX_LATE_SECONDS = 1.0  # of a timer; later means that this process stood still: a suspended machine, a debugger
READ_SECONDS = 0.1  # to read the messages that wait in the socket, where this process was busy
EXPIRY_WARNING_SECONDS = 7 * 86_400.0  # before a key expires

Handlers = Mapping[str, Callable[["Attempt", Any], None]]


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        code: the name of the status; OK where the bus ended the stream in good order.
        text: the text of the status.
        seconds: how long the session was live; below 0 where it never was.
        probed: whether the text is the result of a probe of the server.
    """

    code: str
    text: str
    seconds: float
    probed: bool = False

    @property
    def cause(self) -> str:
        """The text without the words that grpc puts before it."""
        return self.text.rpartition("last error: ")[2].removeprefix("UNKNOWN: ") or self.code

    @property
    def unexplained(self) -> bool:
        """Whether a server is there, and grpc does not know why it ended the connection."""
        if self.seconds >= 0:
            return False
        if "http1.x server" in self.text:  # an HTTP port, whatever the code
            return True
        return (
            self.code == "UNAVAILABLE"
            and "refused" not in self.text
            and any(word in self.text for word in _UNEXPLAINED)
        )


class Attempt:
    """One attempt: a transport, the stream on it and its session. Everything runs on the connection's loop."""

    def __init__(
        self, settings: ConnectionSettings, loop: asyncio.AbstractEventLoop, credential: Credential | None = None
    ) -> None:
        self._settings = settings
        self._loop = loop
        self.credential = credential
        self.session: PeerSession = PeerSession(Side.PEER, wire.InvokeRequest, loop.time())
        self.transport = self._open_transport()
        self.attached: wire.Attached | None = None  # the bus's last answer to an attach
        self.attaching = False  # whether an attach is on its way
        self.remaining_tools: list[list[pb.Tool]] = []  # those that did not fit into the attach, for Register
        self.live_at = 0.0  # when the bus answered the first attach
        self.drain_reason = ""  # the reason of the bus's drain; empty while it sent none
        self.fatal_error: ToolBusError | None = None  # why no further attempt may follow; None where one may
        self.all_read = False  # whether the bus has answered every call that it read; known when the stream has ended
        self._silence_timer: asyncio.TimerHandle | None = None  # None before the start
        self._allowed = settings.timings.handshake  # seconds without a message after which the bus counts as lost
        self._expiry_timer: asyncio.TimerHandle | None = None  # None while no key is known to expire
        self.session.outbox.wake = self.transport.wake

    def _open_transport(self) -> PeerTransport:
        settings, outbox = self._settings, self.session.outbox
        lane = connect_lane(settings.bus) if settings.lane else None
        if lane is not None:
            return LaneTransport(lane, settings.bus, outbox, self._loop)
        from toolbus.sdk.grpc_transport import GrpcTransport  # grpc takes a third of a program's start

        return GrpcTransport(settings.bus, self.credential, outbox, settings.timings.writer, self._loop)

    @property
    def reached(self) -> bool:
        """Whether this attempt reached the bus, which may then have read the attach."""
        return self.attached is not None or self.transport.reached

    @property
    def over(self) -> bool:
        """Whether its session has ended."""
        return self.session.state is State.CLOSED

    def opened(self, attached: wire.Attached) -> None:
        """Takes the bus's answer to the first attach; from then on the bus has to send a message in each interval."""
        timings = self._settings.timings
        self.live_at = self._loop.time()
        self._allowed = 4 * attached.heartbeat_seconds if attached.heartbeat_seconds > 0 else timings.silence
        self._watch_silence()
        if attached.expires_seconds > 0:
            delay = max(attached.expires_seconds - EXPIRY_WARNING_SECONDS, 0.0)
            self._expiry_timer = self._loop.call_later(delay, self._warn_of_expiry, attached, self.live_at)

    async def run(self, handlers: Handlers, stalls: StallWatch) -> AttemptEnd:
        """Passes each field of each message to its handler until the stream ends; returns how it ended."""
        session, clock, now = self.session, stalls.clock, self._loop.time

        def receive(frame: wire.InvokeResponse) -> None:
            if clock() > stalls.due:
                stalls.notice()
            for field, value in session.receive(frame, now()):
                handlers[field](self, value)
            if session.state is State.LEAVING:
                self.half_close_if_idle()

        self.transport.start(receive)
        self._watch_silence()
        try:
            code, text = await self.transport.ended()
        except ProtocolError as error:
            code, text = "INTERNAL", str(error)
        seconds = now() - self.live_at if self.attached is not None else -1.0
        if code == "OK" and self.drain_reason:
            text = f"the bus disconnected this peer: {self.drain_reason}"
            self.all_read = self.drain_reason != "replaced"
        return AttemptEnd(code, text, seconds)

    async def close(self) -> None:
        """Ends timers and transport."""
        for timer in (self._silence_timer, self._expiry_timer):
            if timer is not None:
                timer.cancel()
        await self.transport.close()
        outbox = self.session.outbox
        outbox.wake = outbox.full = lambda: None  # else they refer to each other

    def half_close_if_idle(self) -> None:
        """Half-closes if no call is pending or in flight; for a session that the bus drains."""
        if not self.session.pending and not self.session.in_flight:
            self.transport.half_close()

    def _warn_of_expiry(self, attached: wire.Attached, attached_at: float) -> None:
        """Warns some days before the key of this peer expires."""
        left = max(attached.expires_seconds - (self._loop.time() - attached_at), 0.0)
        place = self.credential.place if self.credential is not None else "this peer"
        log.warning(
            "the key of %s (identity %s) expires in %.1f days: `toolbus keys renew %s` on the machine of the bus, and "
            "copy the file here; it is read whenever this peer attaches",
            *(place, quote(attached.identity), left / 86_400, attached.identity or "NAME"),
        )

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
            self.transport.cancel()
            return
        self._watch_silence()


def error_of(code: str, text: str) -> ToolBusError:
    """Returns the exception for a status of the bus, by its name, with the bus's text."""
    if code == "UNAVAILABLE":
        return PeerLost(text)
    return FATAL.get(code, ToolBusError)(text or code)


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
        bus: the address of the bus that refused it, where the plugin attaches to several; else empty.
    """

    name: str
    error: str
    role: str | None = None
    source: str = ""
    bus: str = ""

    @classmethod
    def from_wire(cls, message: wire.RefusedTool, bus: str = "") -> RefusedTool:
        """Copies it out of its message."""
        return cls(message.name, message.error or NO_REASON, message.role or None, message.source, bus)


@dataclass(frozen=True, slots=True)
class WaitingTool:
    """A declared tool that the bus has accepted, but whose role does not exist yet.

    Attributes:
        name: as it was declared.
        role: the role for which it waits.
        bus: the address of the bus that lets it wait, where the plugin attaches to several; else empty.
    """

    name: str
    role: str
    bus: str = ""


_Key = tuple[str, str | None]


class Standing:
    """The refused and waiting tools of one peer.

    Args:
        source: whose tools these are, for the log.
        on_refused: called with the names of newly refused tools, and the reason.
        bus: the address of the bus, where the peer attaches to several.

    Attributes:
        parts: those of each bus, by address, where the peer attaches to several.
    """

    def __init__(self, source: str, on_refused: Callable[[Sequence[str], str], object], bus: str = "") -> None:
        self.parts: dict[str, Standing] = {}
        self._source = source
        self._on_refused = on_refused
        self._bus = bus
        self._refused: dict[_Key, RefusedTool] = {}
        self._waiting: dict[_Key, WaitingTool] = {}
        self._logged: dict[_Key, str] = {}  # the reasons that were logged, across reconnects
        self._logged_waiting: set[_Key] = set()  # the waiting tools that were logged

    def __repr__(self) -> str:
        return f"<Standing refused={len(self._refused)} waiting={len(self._waiting)}>"

    @property
    def refused(self) -> tuple[RefusedTool, ...]:
        """The tools that the bus refused, in the order in which they were declared."""
        return (*self._refused.values(), *(each for part in tuple(self.parts.values()) for each in part.refused))

    @property
    def waiting(self) -> tuple[WaitingTool, ...]:
        """The tools that wait for a role."""
        return (*self._waiting.values(), *(each for part in tuple(self.parts.values()) for each in part.waiting))

    def of_bus(self, bus: str) -> Standing:
        """Returns that of one of several buses."""
        return self.parts.setdefault(bus, Standing(self._source, self._on_refused, bus))

    def attached(self, refused: Iterable[wire.RefusedTool], waiting: Iterable[wire.WaitingTool]) -> None:
        """Takes the answer to an attach, which replaces all answers before."""
        self._refused, self._waiting = {}, {}
        self.added(refused, waiting)
        self._logged = {key: each.error for key, each in self._refused.items()}

    def added(self, refused: Iterable[wire.RefusedTool], waiting: Iterable[wire.WaitingTool]) -> None:
        """Takes the answer to a Register, which adds to the answers before."""
        new_refused = [RefusedTool.from_wire(message, self._bus) for message in refused]
        new_waiting = [WaitingTool(message.name, message.role, self._bus) for message in waiting]
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
