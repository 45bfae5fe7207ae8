"""Connects one peer to the bus: a thread with a loop, on it one Invoke stream at a time.

Joins `Reconnect` (the attempts), `ClientHandshake` (the declared tools), `OutgoingCalls`, the `Delegate` and the
function that takes the bus's calls; this module sends the answers. No task is made for a call: the two loops of the
attempt do all. An author's code cannot block the connection (`SharedLoop`), so the bus never takes a plugin whose
handler blocks for one that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import grpc
import grpc.aio

from toolbus.cancellation import is_being_cancelled
from toolbus.errors import Code, InvalidRequest, PeerLost, Stage, ToolBusError
from toolbus.functions.runner import Outcome
from toolbus.functions.threads import ChangeSignal, Inbox
from toolbus.sdk.attempt import Attempt, AttemptEnd, error_of
from toolbus.sdk.call_barrier import CallBarrier, Postponed
from toolbus.sdk.client_handshake import ClientHandshake
from toolbus.sdk.connection_settings import ConnectionSettings
from toolbus.sdk.outgoing_calls import OutgoingCall, OutgoingCalls, PeerSession
from toolbus.sdk.peer_delegate import Delegate, IncomingCall
from toolbus.sdk.reconnect import Reconnect
from toolbus.sdk.shared_loop import SharedLoop
from toolbus.session import State
from toolbus.stall import StallWatch
from toolbus.text import clean_line
from toolbus.tool import CallError, Result
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.sdk.connection")  # one logger for all of a connection

DRAIN_TICK = 0.05  # seconds between two looks at the calls in flight, during a graceful shutdown
RESULT_OVERHEAD = 64  # bytes of a result beside its output
LARGE_RESULT = 65_536  # characters, of up to 4 bytes each: only larger results are measured in bytes

Answer = tuple[PeerSession, str, Outcome]
"""The end of a call of the bus: the session it came on, its id there, how it ended."""

TakeCalls = Callable[["Connection", PeerSession, Mapping[str, pb.ToolCall]], Mapping[str, IncomingCall]]
"""Begins to answer the calls of one message, by their ids, each later and once, by `Connection.answer` or `answer_all`.

It runs on the connection's loop, and must not hold the messages of the calls after it has returned.
"""


class Connection:
    """A peer's one connection. Methods are safe from any thread, coroutines belong on ``loop`` (see `submit`).

    Attributes:
        calls: the calls that this peer makes.
        shared: runs the loop, on a thread of its own or in turns of a program's loop.
        changes: fires when the state changes, for coroutines that wait for one.
        stalls: tells when this process stood still.
        identity: the name that this peer's key proved, as the bus last reported it; "" without a key.
        expires: when the key expires; None if it never does, or if the bus has not reported it.
    """

    def __init__(self, settings: ConnectionSettings, delegate: Delegate, take_calls: TakeCalls) -> None:
        self.settings = settings
        self._delegate = delegate
        self._take_calls = take_calls
        self.shared = SharedLoop(f"toolbus-{settings.source}")
        self.loop = self.shared.loop
        self._inbox = Inbox(self.loop)
        self.calls = OutgoingCalls(self.loop, settings.address, secrets.token_hex(4))
        self.changes = ChangeSignal(self.loop)
        self.identity = ""
        self.expires: datetime | None = None
        timings = settings.timings
        self.stalls = StallWatch(timings.tick, timings.late)
        self.stalls.listen(self._stalled, lambda: None)
        self._handshake = ClientHandshake(settings, delegate, self.loop, self.changes)
        self._reconnect = Reconnect(settings, delegate, self.calls, self.changes, self._run_attempt)
        self._attempt: Attempt | None = None  # the current one; None between two
        self._task: asyncio.Task[None] | None = None  # runs `_live`; None before the start
        self._error: ToolBusError | None = None  # why the connection failed for good; None unless it did
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
                out.fail(Code.UNAVAILABLE, "this connection is closed: make a new one", Stage.NOT_DISPATCHED)

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
            PeerLost: the connection is closed.
        """
        try:
            return self.shared.submit(coroutine)
        except RuntimeError:
            raise PeerLost("this connection is closed: make a new one") from None

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
        if self._error is not None:
            raise self._error

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
                rpc = getattr(attempt.stub, method)
                return await rpc(request, timeout=max(left, 0.001), metadata=attempt.metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE and attempt is self._attempt:
                    raise error_of(error.code(), error.details() or "") from None
            except asyncio.CancelledError:  # the channel was closed under it
                if attempt is self._attempt or is_being_cancelled():
                    raise
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
            attempt.half_close()
            if attempt.reached and not attempt.session.in_flight:
                await self._until_over(attempt, self.settings.timings.half_close)
            attempt.stream.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run_attempt(self, attempt: Attempt) -> AttemptEnd:
        """Runs one attempt from its handshake to its end, for `Reconnect`."""
        self._attempt = attempt
        self._handshake.attach(attempt)
        attempt.start()
        try:
            return await attempt.read(self._handlers, self.stalls)
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
        if self._error is not None:
            raise self._error
        if self._over or self._reconnect.ending:
            raise PeerLost(self._closed_text)

    # -- the life of the connection ------------------------------------------------------------------------------

    def _begin(self, _: None) -> None:
        self.stalls.start()
        self._task = self.loop.create_task(self._live())

    async def _live(self) -> None:
        try:
            self._error = await self._reconnect.run()
        except Exception as error:
            log.exception("a fault of the SDK ended the connection of %s", self.settings.source)
            self._error = ToolBusError(f"a fault of the SDK: {error!r}")
        finally:
            self._over = True
            self.stalls.stop()
            self.calls.close(self._closed_text if self._error is None else str(self._error))
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
            attempt.session.echo(heartbeat)

    def _on_events(self, attempt: Attempt, events: Iterable[wire.Event]) -> None:
        for event in events:
            self._delegate.event(event)

    def _on_drain(self, attempt: Attempt, drain: wire.Drain) -> None:
        attempt.drain_reason = drain.reason or "shutdown"
        attempt.session.leave()
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
