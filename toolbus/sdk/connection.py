"""Connects one peer to the bus: a thread with a loop, on it one Invoke stream at a time.

Joins `Reconnect` (the attempts: `reconnect.py`), `ClientHandshake` (the declared tools), `OutgoingCalls`, the
`Delegate` and the function that takes the bus's calls; this module sends the answers. No task is made for a call: the
two loops of the attempt do all. An author's code cannot block the connection (`SharedLoop`), so the bus never takes a
plugin whose handler blocks for one that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol

from toolbus.common.stall import StallWatch
from toolbus.common.text import clean_line, list_names
from toolbus.errors import Code, InvalidRequest, PeerLost, Stage, ToolBusError
from toolbus.functions.runner import Outcome
from toolbus.functions.workers import ChangeSignal, Inbox
from toolbus.protocol.limits import Limits
from toolbus.protocol.session import State
from toolbus.protocol.tool import PROTOCOL_VERSIONS, CallError, Result
from toolbus.sdk.attempt import FATAL, Attempt, AttemptEnd, Delegate, IncomingCall, error_of
from toolbus.sdk.connection_settings import MESSAGE_BYTES, ConnectionSettings, several_buses
from toolbus.sdk.outgoing_calls import OutgoingCall, OutgoingCalls, PeerSession
from toolbus.sdk.reconnect import Reconnect
from toolbus.sdk.shared_loop import CLOSED, SharedLoop
from toolbus.sdk.transport import UnaryFailed
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.sdk.connection")  # one logger for all of a connection

# A process that was stopped finds calls in its socket that the bus has ended meanwhile; their cancels, or the end of
# the stream, come behind them. The bus echoes a heartbeat behind everything that it has sent before. So the callers
# of all calls that are not cancelled when the echo comes still wait for them. The same is true of calls that wait in
# a queue of this process.

Take = Callable[[PeerSession, Mapping[str, pb.ToolCall]], Mapping[str, IncomingCall]]
SendAnswer = Callable[[PeerSession, Result], None]


class Postponed(Protocol):
    """A call that waits in a queue of this process."""

    session: PeerSession

    def resume(self) -> None:
        """Begins it, unless it was cancelled."""


class CallBarrier:
    """The barrier of one connection. Everything runs on the connection's loop.

    Args:
        handlers: the connection's handler of each field of a message; the barrier replaces that of calls while it
            holds them.
        take: begins to answer calls, given by their ids.
        answer: answers a call that never begins.

    Attributes:
        is_holding: whether calls are held now; other threads may read it.
    """

    def __init__(self, handlers: dict[str, Callable[[Attempt, Any], None]], take: Take, answer: SendAnswer) -> None:
        self._handlers = handlers
        self._on_calls = handlers["calls"]  # the handler while no call is held
        self._take = take
        self._answer = answer
        self._session: PeerSession | None = None  # the stream whose calls are held; None while none are
        self._heartbeat = 0  # the heartbeat whose echo releases them
        self._held: list[Postponed] = []  # oldest first
        self.is_holding = False

    def __repr__(self) -> str:
        return f"<CallBarrier {f'holding {len(self._held)}' if self.is_holding else 'open'}>"

    def hold(self, session: PeerSession) -> None:
        """Holds the calls of a stream from now on, until the bus echoes a heartbeat that is sent now."""
        self._session, self._heartbeat, self.is_holding = session, session.send_own_heartbeat(), True
        self._handlers["calls"] = self._hold_calls

    def _hold_calls(self, attempt: Attempt, calls: Iterable[pb.ToolCall]) -> None:
        session = attempt.session
        for call in calls:
            if call.call_id not in session.in_flight:
                held = _HeldCall(session, call, self._take, self._answer)
                session.in_flight[call.call_id] = held
                self._held.append(held)

    def postpone(self, job: Postponed) -> None:
        """Holds a call that was about to begin; begins it if no call is held any more."""
        if self.is_holding and job.session is self._session:
            self._held.append(job)
        else:
            job.resume()

    def echo(self, heartbeat: wire.Heartbeat) -> None:
        """Begins the held calls if this is the echo of the heartbeat that was sent for them."""
        if self.is_holding and heartbeat.sequence >= self._heartbeat:
            held = self._held
            self.release()
            for each in held:
                each.resume()

    def release(self) -> None:
        """Holds no more calls and forgets those that it has: their stream has ended, or `echo` begins them."""
        self._held, self._session, self.is_holding = [], None, False
        self._handlers["calls"] = self._on_calls


class _HeldCall:
    """A call that has arrived and not begun."""

    __slots__ = ("_answer", "_call", "_cancelled", "_take", "session")

    def __init__(self, session: PeerSession, call: pb.ToolCall, take: Take, answer: SendAnswer) -> None:
        self.session = session
        self._call = call
        self._take = take
        self._answer = answer
        self._cancelled = False

    def cancel(self, reason: str) -> None:
        """Ends the call, which never ran."""
        if not self._cancelled:
            self._cancelled = True
            text = f"the call of {self._call.name} was cancelled before it began: {reason}"
            error = CallError(Code.CANCELLED, text, Stage.NOT_DISPATCHED)
            self._answer(self.session, Result(self._call.call_id, is_error=True, error=error))

    def resume(self) -> None:
        """Begins the call, unless it was cancelled."""
        if not self._cancelled:
            self.session.in_flight.update(self._take(self.session, {self._call.call_id: self._call}))


DEFAULTS = Limits()  # of a bus that leaves some of its limits unset


class ClientHandshake:
    """The handshakes of one connection. Everything runs on its loop.

    Attributes:
        refusals: why the bus refused the last attach, or with all_or_none its tools; empty if it accepted them.
    """

    def __init__(
        self, settings: ConnectionSettings, delegate: Delegate, loop: asyncio.AbstractEventLoop, changes: ChangeSignal
    ) -> None:
        self.refusals: tuple[str, ...] = ()
        self._settings = settings
        self._delegate = delegate
        self._loop = loop
        self._changes = changes
        self._outdated = False  # whether the tools changed since the last attach
        self._registering: asyncio.Task[None] | None = None  # the newest `_register_remaining`; None before the first

    def confirmed(self, attempt: Attempt | None) -> bool:
        """Tells whether the bus has answered for all tools that this peer has now."""
        return attempt is not None and attempt.attached is not None and not attempt.attaching and not self._outdated

    def tools_changed(self, attempt: Attempt | None) -> None:
        """Declares the tools again: now, or as soon as the bus has answered the current attach."""
        self._outdated = True
        if attempt is not None:
            self._attach_if_outdated(attempt)

    def attach(self, attempt: Attempt) -> None:
        """Puts an attach with all tools that this peer has now into a frame of its own."""
        self._outdated = False
        self.refusals = ()
        first, *attempt.remaining_tools = portions(self._delegate.tools(), self._settings.timings.attach_bytes)
        attach = attach_of(self._settings, first, self._delegate.subscriptions())
        attach.notifications_after = self._delegate.notifications_after()
        attempt.attaching = True
        outbox = attempt.session.outbox
        outbox.seal()
        outbox.room(attach.ByteSize()).attach.CopyFrom(attach)
        outbox.seal()

    def attached(self, attempt: Attempt, attached: wire.Attached) -> None:
        """Takes the bus's answer to an attach; the first one opens the session."""
        first = attempt.attached is None
        attempt.attached = answer = wire.Attached()
        answer.CopyFrom(attached)
        set_defaults(answer.limits, self._settings.max_in_flight)
        if first:
            attempt.opened(answer)
            attempt.session.open(answer.limits.calls_in_flight, answer.limits.message_bytes)
        address, source = self._settings.address, self._settings.source
        itself = bool(answer.refused) and not answer.refused_total
        if itself or self._settings.all_or_none:
            self.refusals = tuple(dict.fromkeys(each.error for each in answer.refused))  # often one reason for all
        if itself:
            reason = "; ".join(self.refusals)
            log.error("the bus at %s refused the tools of %s: %s", address, source, clean_line(reason))
            self._delegate.refused([], reason)
        else:
            self._delegate.attached(answer)
        if first:
            names = [*answer.registered, *(tool.name for tools in attempt.remaining_tools for tool in tools)]
            count = f"{len(names)} tool{'' if len(names) == 1 else 's'}"
            log.info("attached to the bus at %s as %s, %s: %s", address, source, count, list_names(names))
        if attempt.remaining_tools and not self.refusals:
            self._registering = self._loop.create_task(self._register_remaining(attempt))
        else:
            self._finish(attempt)

    async def _register_remaining(self, attempt: Attempt) -> None:
        """Offers the tools that did not fit into the attach."""
        assert attempt.attached is not None  # its answer led here
        try:
            for tools in attempt.remaining_tools:
                request = wire.RegisterRequest(
                    session_id=attempt.attached.session_id, tools=tools, all_or_none=self._settings.all_or_none
                )
                self._delegate.registered(await attempt.transport.unary("Register", request))
        except UnaryFailed as error:
            if attempt.over:
                return
            text = error.text or error.code
            source, shown = self._settings.source, clean_line(text)
            log.error("the bus at %s refused tools of %s: %s", self._settings.address, source, shown)
            self._delegate.refused([tool.name for tools in attempt.remaining_tools for tool in tools], text)
            if error.code in FATAL:
                attempt.fatal_error = error_of(error.code, text)
            attempt.transport.cancel()
            return
        if not attempt.over:
            self._finish(attempt)

    def _finish(self, attempt: Attempt) -> None:
        attempt.attaching = False
        self._attach_if_outdated(attempt)
        self._changes.notify()

    def _attach_if_outdated(self, attempt: Attempt) -> None:
        """Attaches again, unless an attach waits for its answer, which leads here too."""
        session = attempt.session
        if self._outdated and not attempt.attaching and not session.drain_sent and session.state is State.LIVE:
            self.attach(attempt)


def attach_of(settings: ConnectionSettings, tools: Sequence[pb.Tool], subscriptions: Sequence[Any]) -> wire.Attach:
    """Returns an attach with these tools."""
    return wire.Attach(
        protocol_version=PROTOCOL_VERSIONS[-1],
        source=settings.source,
        instance=settings.instance if settings.made_by in (0, pid := os.getpid()) else f"{settings.instance}.{pid}",
        tools=tools,
        max_in_flight=settings.max_in_flight,
        max_message_bytes=MESSAGE_BYTES,
        qualified=settings.qualified,
        subscribe=subscriptions,
        token=settings.token,
        notices=settings.notices,
        all_or_none=settings.all_or_none,
    )


def set_defaults(limits: wire.Limits, max_in_flight: int) -> None:
    """Fills in the limits that the bus left unset.

    Args:
        max_in_flight: what the attach asked for.
    """
    limits.message_bytes = limits.message_bytes or DEFAULTS.message_bytes
    limits.calls_in_flight = limits.calls_in_flight or max_in_flight or DEFAULTS.calls_in_flight
    limits.arguments_bytes = limits.arguments_bytes or DEFAULTS.arguments_bytes
    limits.result_bytes = limits.result_bytes or DEFAULTS.result_bytes


def portions(tools: Sequence[pb.Tool], max_bytes: int) -> list[list[pb.Tool]]:
    """Cuts tools into portions of at most so many bytes; at least one, which may be empty."""
    portions: list[list[pb.Tool]] = [[]]
    filled = 0
    for tool in tools:
        size = tool.ByteSize() + 8
        if filled + size > max_bytes and portions[-1]:
            portions.append([])
            filled = 0
        portions[-1].append(tool)
        filled += size
    return portions


DRAIN_TICK = 0.05  # seconds between two looks at the calls in flight, during a graceful shutdown
RESULT_OVERHEAD = 64  # bytes of a result in addition to its output
LARGE_RESULT = 65_536  # characters, of up to 4 bytes each: only larger results are measured in bytes

Answer = tuple[PeerSession, str, Outcome]
"""The end of a call of the bus: the session it came on, its id there, how it ended."""

TakeCalls = Callable[["Connection", PeerSession, Mapping[str, pb.ToolCall]], Mapping[str, IncomingCall]]
"""Begins to answer the calls of one message, by their ids, each later and once, by `Connection.answer` or `answer_all`.

It runs on the connection's loop, and must not hold the messages of the calls after it has returned.
"""


class Connection:
    """A peer's connection to one bus. Methods are safe from any thread, coroutines belong on ``loop`` (see `submit`).

    Args:
        shared: runs the loop of several connections of one peer; None makes one for this connection alone.
        changes: theirs too.

    Attributes:
        calls: the calls that this peer makes.
        shared: runs the loop, on a thread of its own or in turns of a program's loop.
        changes: fires when the state changes, for coroutines that wait for one.
        stalls: tells when this process stood still.
        identity: the name that this peer's key proved, as the bus last reported it; "" without a key.
        expires: when the key expires; None if it never does, or if the bus has not reported it.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        delegate: Delegate,
        take_calls: TakeCalls,
        shared: SharedLoop | None = None,
        changes: ChangeSignal | None = None,
    ) -> None:
        self.settings = settings
        self._delegate = delegate
        self._take_calls = take_calls
        self.shared = shared or SharedLoop(f"toolbus-{settings.source}")
        self.loop = self.shared.loop
        self._inbox = Inbox(self.loop)
        self.calls = OutgoingCalls(self.loop, settings.address, secrets.token_hex(4))
        self.changes = changes or ChangeSignal()
        self.identity = ""
        self.expires: datetime | None = None
        timings = settings.timings
        self.stalls = StallWatch(timings.tick, timings.late)
        self.stalls.listen(self._stalled, lambda: None)
        self._handshake = ClientHandshake(settings, delegate, self.loop, self.changes)
        self._reconnect = Reconnect(settings, delegate, self.calls, self.changes, self._run_attempt)
        self._attempt: Attempt | None = None  # the current one; None between two
        self._task: asyncio.Task[None] | None = None  # runs `_live`; None before the start
        self.error: ToolBusError | None = None  # why the connection failed for good; None unless it did
        self._over = False  # whether the connection has ended
        self._result_bytes = 0  # the largest result, and piece of progress, that the bus takes; 0 before an attach
        self._unmeasured = 0  # a result of so many characters is below that limit, whatever they are
        self._closed_text = f"the connection of {settings.source!r} is closed"
        # The handler of each field of a message.
        self._handlers: dict[str, Callable[[Attempt, Any], None]] = {
            "attached": self._on_attached,
            "events": self._on_events,
            "calls": self._on_calls,
            "progress": lambda attempt, items: self.calls.progress(attempt.session, items),
            "results": lambda attempt, items: self.calls.results(attempt.session, items),
            "cancels": self._on_cancels,
            "heartbeat": self._on_heartbeat,
            "drain": self._on_drain,
        }
        self._barrier = CallBarrier(self._handlers, partial(take_calls, self), self.answer)

    def __repr__(self) -> str:
        session = self._attempt.session if self._attempt else None
        return f"<Connection {self.settings.source} to {self.settings.address} {session!r} {self.calls!r}>"

    @property
    def used(self) -> Connection | None:
        """The connection to the bus that a host uses now: this one."""
        return self

    @property
    def session(self) -> PeerSession | None:
        """The session that the bus has opened; None while there is none."""
        attempt = self._attempt
        return attempt.session if attempt is not None and attempt.attached is not None else None

    @property
    def echoes(self) -> bool:
        """Whether the bus answers heartbeats of this peer."""
        attempt = self._attempt
        return attempt is not None and attempt.attached is not None and attempt.attached.echoes

    @property
    def each(self) -> Sequence[Connection]:
        """The connections to all buses that this peer reaches: this one."""
        return (self,)

    # -- from any thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, which begins to connect."""
        self.shared.start()
        self._inbox.put(self._begin)

    def begin(self, out: OutgoingCall) -> None:
        """Sends a call; its result comes through ``out.deliver``."""
        self.begin_many((out,))

    def begin_many(self, calls: Iterable[OutgoingCall], loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Sends calls together; ``loop`` is the running one, if it shares its turns (`SharedLoop.join`)."""
        begin = self.calls.begin_many
        if loop is not None and self.shared.turn(loop, begin, calls):
            return
        if not self._inbox.put(begin, calls):
            for out in calls:
                out.fail(Code.UNAVAILABLE, CLOSED, Stage.NOT_DISPATCHED)

    def cancel(self, *calls: OutgoingCall) -> None:
        """Cancels calls; nothing is delivered for them afterwards."""
        self._inbox.put(self.calls.cancel_many, calls)

    def answer(self, session: PeerSession, result: Result) -> None:
        """Answers a call of the bus. Only the first answer is sent, and none once the session is over."""
        self._inbox.put(self._answer_all, [(session, result.call_id, result)])

    def answer_all(self, answers: list[Answer], loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Answers several calls, each as `answer` does; ``loop`` is that of `begin_many`."""
        if loop is None or not self.shared.turn(loop, self._answer_all, answers):
            self._inbox.put(self._answer_all, answers)

    def report(self, session: PeerSession, progress: pb.ToolProgress) -> None:
        """Sends progress of a call of the bus."""
        self._inbox.put(self._report, (session, progress))

    def postpone(self, job: Postponed) -> bool:
        """Holds a call that waited in a queue during a stall of this process: the bus may have ended it meanwhile.

        Returns:
            False if there was no stall: the call may begin.
        """
        if not self._barrier.is_holding and self.stalls.clock() <= self.stalls.due:
            return False
        return self._inbox.put(self._postpone, job)

    def tools_changed(self) -> None:
        """Declares the tools again; several changes in a row become one declaration."""
        self._inbox.put(self._tools_changed)

    def unanswered(self, seconds: float) -> PeerLost:
        """Returns the error that no bus answered within some seconds: its address, why, and how to fix it."""
        return PeerLost(self.calls.unanswered(seconds))

    def submit(self, coroutine: Any) -> Future[Any]:
        """Runs one of the coroutines below on the connection's loop.

        Raises:
            PeerLost: the connection is closed; the future raises it too where the connection closes meanwhile.
        """
        return self.shared.submit(coroutine)

    def stop_thread(self) -> None:
        """Ends the thread; for after `close`."""
        self.shared.stop()
        self._inbox.run_remaining()  # calls that other threads made meanwhile: they end in an error

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Waits until the bus has confirmed all tools that this peer has now.

        Raises:
            RequestError: the bus refuses this peer or its tools, for a reason that waiting does not fix.
            PeerLost: the connection was closed.
        """
        while True:
            self._check()
            if self._handshake.confirmed(self._attempt):
                if reasons := self._handshake.refusals:
                    raise InvalidRequest(f"the bus refused the tools of {self.settings.source!r}: {'; '.join(reasons)}")
                return
            await self.changes.next()

    async def ended(self) -> None:
        """Waits until the connection has ended for good.

        Raises:
            RequestError: the bus refuses this peer, for a reason that waiting does not fix.
            PeerLost: another process took this peer's place, or an operator asked it to disconnect.
        """
        while not self._over:
            await self.changes.next()
        if self.error is not None:
            raise self.error

    async def unary(self, method: str, request: Any, timeout: float) -> Any:
        """Sends a request to one of the service's unary RPCs, as soon as there is a connection.

        Only for requests that may be sent twice.

        Raises:
            ToolBusError: with the bus's text; PeerLost where no bus answered in time.
        """
        deadline = self.loop.time() + timeout
        while True:
            left = deadline - self.loop.time()
            if not await self.changes.until(self._connected, left):
                raise self.unanswered(timeout)
            attempt = self._attempt
            assert attempt is not None  # connected, and nothing ran since
            try:
                return await attempt.transport.unary(method, request, max(left, 0.001))
            except UnaryFailed as error:
                if error.code != "UNAVAILABLE" and attempt is self._attempt:
                    raise error_of(error.code, error.text) from None
            await asyncio.sleep(self.settings.timings.first_pause)

    async def close(self, reason: str = "closed", grace_seconds: float = 0.0) -> None:
        """Shuts down gracefully: sends a drain, finishes the calls in flight within the grace period, disconnects.

        May be called again.
        """
        self._reconnect.end()
        self.changes.notify()
        attempt = self._attempt
        if not grace_seconds:
            self.calls.close(self._closed_text, Code.CANCELLED)
        if attempt is not None and attempt.reached:
            attempt.session.send_drain(reason, grace_seconds)
            await self._finish_in_flight(attempt, grace_seconds)
        self.calls.close(self._closed_text, Code.CANCELLED)
        if attempt is not None and attempt is self._attempt:
            attempt.transport.half_close()
            if attempt.reached and not attempt.session.in_flight:
                await self._until_over(attempt, self.settings.timings.half_close)
            attempt.transport.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def drop(self) -> None:
        """Ends the connection at once, without a drain; on the loop. What was pending goes where its loss leads."""
        self._reconnect.end()
        self.changes.notify()
        if self._attempt is not None:
            self._attempt.transport.cancel()

    def retire(self) -> None:
        """Makes no further attempt once the bus has ended this one; on the loop."""
        self._reconnect.end()

    async def _run_attempt(self, attempt: Attempt) -> AttemptEnd:
        """Runs one attempt from its handshake to its end, for `Reconnect`."""
        self._attempt = attempt
        self._handshake.attach(attempt)
        try:
            return await attempt.run(self._handlers, self.stalls)
        finally:
            self._lose(attempt)
            await attempt.close()

    async def _finish_in_flight(self, attempt: Attempt, grace_seconds: float) -> None:
        """Waits until the bus, which has read our drain, ends the stream because no call is in flight any more.

        Our own table is not enough: the bus may have sent calls before it read the drain, which are still on their way.
        So the bus gets some time after the last call, before this side half-closes.
        """
        session, clock, timings = attempt.session, self.loop.time, self.settings.timings
        deadline = clock() + grace_seconds
        idle_since = clock()
        while attempt is self._attempt:
            if session.in_flight:
                idle_since = clock()
                if idle_since >= deadline:
                    log.warning("%d calls were not finished within %g s", len(session.in_flight), grace_seconds)
                    return
            elif clock() - idle_since >= timings.half_close:
                return
            await self._until_over(attempt, DRAIN_TICK)

    async def _until_over(self, attempt: Attempt, seconds: float) -> None:
        await self.changes.until(lambda: attempt is not self._attempt, seconds)

    def _connected(self) -> bool:
        self._check()
        return self._attempt is not None and self._attempt.attached is not None

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if self._over or self._reconnect.ending:
            raise PeerLost(self._closed_text)

    # -- the life of the connection ------------------------------------------------------------------------------

    def _begin(self, _: None) -> None:
        self.stalls.start()
        self._task = self.loop.create_task(self._live())

    async def _live(self) -> None:
        try:
            self.error = await self._reconnect.run()
        except Exception as error:
            log.exception("a fault of the SDK ended the connection of %s", self.settings.source)
            self.error = ToolBusError(f"a fault of the SDK: {error!r}")
        finally:
            self._over = True
            self.stalls.stop()
            self.calls.close(self._closed_text if self.error is None else str(self.error))
            self.changes.notify()

    def _lose(self, attempt: Attempt) -> None:
        """Ends the session of an attempt, with the calls that were pending or in flight on it."""
        pending, in_flight = attempt.session.end()
        self._attempt = None
        self._barrier.release()
        self.calls.lost(attempt.session, pending, all_read=attempt.all_read)
        for call in in_flight:
            call.cancel("the connection to the bus broke")
        self.changes.notify()

    def _tools_changed(self, _: None) -> None:
        self._handshake.tools_changed(self._attempt)

    # -- messages of the bus, and answers ------------------------------------------------------------------------

    def _on_attached(self, attempt: Attempt, attached: wire.Attached) -> None:
        first = attempt.attached is None
        if first:
            self._reconnect.connected()
            self.identity = attached.identity
            left = attached.expires_seconds
            self.expires = datetime.now(UTC) + timedelta(seconds=left) if left > 0 else None
            self.calls.no_bus_reason = ""
        self._handshake.attached(attempt, attached)
        if first:
            assert attempt.attached is not None  # the handshake has copied it
            limits = attempt.attached.limits
            self._result_bytes = min(limits.result_bytes, attempt.session.max_item_bytes)
            self._unmeasured = min(LARGE_RESULT, self._result_bytes // 4)
            self.calls.opened(attempt.session, limits.arguments_bytes)
        if first and self.stalls.unsettled:
            self._stalled()

    def _stalled(self) -> None:
        """Holds the calls of a bus that echoes heartbeats: it may have ended them during the stall."""
        attempt = self._attempt
        if attempt is not None and attempt.attached is not None and attempt.attached.echoes:
            self._barrier.hold(attempt.session)

    def _postpone(self, job: Postponed) -> None:
        if self.stalls.clock() > self.stalls.due:
            self.stalls.notice()
        self._barrier.postpone(job)

    def _on_calls(self, attempt: Attempt, calls: Iterable[pb.ToolCall]) -> None:
        in_flight = attempt.session.in_flight
        new = {call_id: call for call in calls if (call_id := call.call_id) not in in_flight}
        in_flight.update(self._take_calls(self, attempt.session, new))

    def _on_cancels(self, attempt: Attempt, cancels: Iterable[pb.ToolCancel]) -> None:
        for cancel in cancels:
            in_flight: IncomingCall | None = attempt.session.in_flight.get(cancel.call_id)
            if in_flight is not None:
                in_flight.cancel(cancel.reason)

    def _on_heartbeat(self, attempt: Attempt, heartbeat: wire.Heartbeat) -> None:
        if heartbeat.from_peer:
            self._barrier.echo(heartbeat)
        else:
            attempt.session.send_alone(heartbeat)

    def _on_events(self, attempt: Attempt, events: Iterable[wire.Event]) -> None:
        for event in events:
            self._delegate.event(event)

    def _on_drain(self, attempt: Attempt, drain: wire.Drain) -> None:
        attempt.drain_reason = drain.reason or "shutdown"
        attempt.session.leave()
        self.changes.notify()
        reason = clean_line(attempt.drain_reason)
        log.info("the bus at %s asks this peer to disconnect: %s", self.settings.address, reason)

    def _answer_all(self, answers: list[Answer]) -> None:
        session, unmeasured = None, self._unmeasured
        for session, call_id, outcome in answers:
            if session.in_flight.pop(call_id, self) is self:
                continue  # answered already, or its session is over
            if type(outcome) is not str or len(outcome) > unmeasured:
                self._answer(session, Result(call_id, outcome) if isinstance(outcome, str) else outcome)
                continue
            outbox = session.outbox
            outbox.room(len(outcome) + RESULT_OVERHEAD)
            message = outbox.add_result()
            message.call_id = call_id
            message.output_json = outcome
        if self._attempt is not None and session is not None and session.state is State.LEAVING:
            self._attempt.half_close_if_idle()

    def _answer(self, session: PeerSession, result: Result) -> None:
        size = len(result.output_json) + sum(block.ByteSize() for block in result.content)
        size += len(result.input_requests_json) + len(result.request_state)
        if size > self._unmeasured:
            result = fitting(result, size, self._result_bytes)
            size = min(size, session.max_item_bytes)
        session.outbox.room(size + RESULT_OVERHEAD).results.append(message_of(result))

    def _report(self, item: tuple[PeerSession, pb.ToolProgress]) -> None:
        session, progress = item
        if progress.call_id in session.in_flight and (size := progress.ByteSize()) <= self._result_bytes:
            session.outbox.room(size).progress.append(progress)


def open_connection(settings: ConnectionSettings, delegate: Delegate, take_calls: TakeCalls, kind: str) -> Connection:
    """Returns what connects a peer: a connection, or where its address names several buses what stands for one.

    Args:
        kind: ``host`` for a peer that uses one bus at a time, ``plugin`` for one that attaches to all.

    Raises:
        SetupError: one of several addresses cannot be used, or the part for several buses was removed.
    """
    if not settings.several:
        return Connection(settings, delegate, take_calls)
    joined: Connection = several_buses().connect(kind, settings, delegate, take_calls)
    return joined


def fitting(result: Result, size: int, limit: int) -> Result:
    """Returns a result, or an error if it is too large: a message above the limit would end the whole stream."""
    exact = size - len(result.output_json) + len(result.output_json.encode("utf-8", "replace"))
    if exact <= limit:
        return result
    text = (
        f"the result has {exact} bytes, more than the limit result_bytes = {limit}: have the tool return less, or a "
        "link"
    )
    error = CallError(Code.RESULT_TOO_LARGE, text, Stage.ACCEPTED, limit=("result_bytes", float(limit)))
    return Result(result.call_id, is_error=True, error=error)


def message_of(result: Result) -> pb.ToolResult:
    """Returns a result as a message, or an error if UTF-8 cannot encode one of its texts."""
    try:
        return result.to_wire()
    except ValueError as problem:  # half of a surrogate pair
        text = f"the tool's result cannot be sent, because a text in it is not valid Unicode: {problem}"
        error = CallError(Code.INTERNAL, text, Stage.ACCEPTED)
        return Result(result.call_id, is_error=True, error=error).to_wire()
