"""Makes the calls of this peer: sends them, retries where that is safe, and ends each in exactly one Result.

`OutgoingCalls` runs on the connection's loop and knows no sockets: the connection opens its session and passes on the
messages of the bus. Two deadlines limit a call. Until its *soft deadline* it waits for a connection, for room and for
its retries. Once the bus has it, the bus applies its timeout, and the *guard deadline*, slightly later, only ends the
calls of a bus that hangs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from toolbus.common.text import escape_surrogates
from toolbus.errors import Code, Stage
from toolbus.functions.call_context import NO_OPTIONS, CallOptions
from toolbus.protocol.session import Session, State
from toolbus.protocol.tool import (
    DEFAULT_TIMEOUT_SECONDS,
    MAX_TIMEOUT_SECONDS,
    TASK_SECONDS,
    CallError,
    Progress,
    Result,
    dump_arguments,
)
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger(__name__)

PeerSession = Session[wire.InvokeRequest]

GUARD_SLACK = 1.0  # seconds that the bus's own timeout may be late: loaded machines, garbage collection
LATE_SECONDS = 0.5  # that the timer for the deadlines may be late; later means that this process stood still
SWEEP_PAUSE = 0.005  # between two sweeps: each looks at every call that waits
OVERHEAD = 256  # bytes of a call in addition to its arguments and context: name, ids, tags
_RETRIED = (Code.UNAVAILABLE, Code.OVERLOADED)
_FIRST_PAUSE = 0.01
_MAX_PAUSE = 1.0
_CANCELLED = "cancelled"
_MAY_HAVE_RUN = "whether the tool ran is not known: check before calling it again"


Deliver = Callable[["OutgoingCall", "Result | Progress"], None]


class OutgoingCall:
    """One call on its way; made on any thread, from then on the connection's.

    Attributes:
        deliver: takes each progress and then the one result, on the connection's loop, and must not block.
        target: the data by which ``deliver`` finds the caller.
        wants_progress: whether progress is delivered.
        timeout: seconds, for the bus; None means the tool's own.
        parent_session: the session of the call that this one is part of; None for a call of its own.
        started_at: when it was made, by ``time.monotonic()``.
        soft_deadline: until when it may wait or be retried, by the same clock.
        guard_deadline: when it ends even if the bus has not answered.
        call_id: the id of the latest attempt; empty before the first.
        frame: the number of the frame that the latest attempt went into.
        attempts: how often the bus refused it and it was retried.
        last_refusal: the newest refusal of those at the latest stage; None before the first.
        accepted: whether progress has shown that the plugin works on it.
        ended: whether the caller has its result, or has cancelled the call.

    The class holds the values that most calls never change: setting them would cost each call time.
    """

    timeout: float | None = None
    parent_session: PeerSession | None = None
    wants_progress = False
    call_id = ""
    frame = 0
    attempts = 0
    last_refusal: Result | None = None
    accepted = False
    ended = False

    def __init__(
        self,
        name: str,
        arguments_json: str,
        deliver: Deliver,
        target: Any = None,
        options: CallOptions = NO_OPTIONS,
        *,
        parent_session: PeerSession | None = None,
        wants_progress: bool = False,
    ) -> None:
        self.name = escape_surrogates(name)
        self.arguments_json = escape_surrogates(arguments_json)
        self.deliver = deliver
        self.target = target
        self.options = options
        self.started_at = now = time.monotonic()
        if parent_session is not None:
            self.parent_session = parent_session
        if wants_progress:
            self.wants_progress = True
        if options is NO_OPTIONS:
            self.soft_deadline = now + DEFAULT_TIMEOUT_SECONDS
            self.guard_deadline = now + (MAX_TIMEOUT_SECONDS + GUARD_SLACK)
            return
        timeout, background_after = options.timeout, options.background_after
        if timeout is not None and not timeout > 0:  # NaN fails this too
            raise ValueError(f"timeout is {timeout!r} s, it must be more than 0; None means the tool's own")
        if background_after is not None and not background_after > 0:
            raise ValueError(f"background_after is {background_after!r} s, it must be more than 0; None means never")
        limit = MAX_TIMEOUT_SECONDS if background_after is None else TASK_SECONDS  # the bus gives no more
        self.timeout = timeout = None if timeout is None else min(timeout, limit)
        self.soft_deadline = now + (background_after or timeout or DEFAULT_TIMEOUT_SECONDS)
        self.guard_deadline = now + min(timeout or MAX_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS) + GUARD_SLACK

    def __repr__(self) -> str:
        return f"<OutgoingCall {self.name} {self.call_id or 'waiting'}{' ended' if self.ended else ''}>"

    def finish(self, result: Result) -> None:
        """Gives the caller its result, once."""
        if not self.ended:
            self.ended = True
            error, last = result.error, self.last_refusal
            if error is not None and last is not None and last.error is not None:
                refusal = last.error
                if error.stage < refusal.stage:
                    result = last  # the caller has to know that an earlier attempt may have run
                elif self.options.schema_hash or not refusal.retry_after_seconds:
                    # A bus that has just started refuses unknown names with a time for the retry. Such a name may be
                    # wrong, unless the caller has seen the declaration.
                    result = replace(result, error=error.after(refusal))
            self.deliver(self, result)

    def fail(
        self,
        code: Code,
        message: str,
        stage: Stage,
        *,
        retry_safe: bool = False,
        limit: tuple[str, float] | None = None,
    ) -> None:
        """Ends the call in an error of this side."""
        error = CallError(code, message, stage, retry_safe, limit)
        self.finish(Result(self.call_id, is_error=True, error=error))


class OutgoingCalls:
    """All calls of one connection. Everything runs on the connection's loop.

    Args:
        address: the bus's, for error texts.
        prefix: of the call ids. It is unique among all connections of all processes, since callbacks show the ids.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str, prefix: str) -> None:
        self._loop = loop
        self._address = address
        self._ids = map(f"{prefix}-{{}}".format, itertools.count(1))
        self._session: PeerSession | None = None  # the session that takes calls; None without one
        self._arguments_bytes = 0  # the bus's limit for arguments; 0 while unknown
        self._unmeasured = 0  # a call of so many characters is below every limit, whatever they are
        self._waiting: deque[OutgoingCall] = deque()  # for a connection or for room, oldest first
        self._pausing: set[OutgoingCall] = set()  # between two attempts
        self._timer: asyncio.TimerHandle | None = None  # the one timer, for the nearest deadline
        self._timer_at = math.inf
        self._closed_reason = ""  # why calls are no longer sent; empty while they are
        self.no_bus_reason = ""  # why there is no connection, for error texts
        # Takes a call that this connection no longer makes, and the error in which it ends unless another bus may run
        # it; None for the error of a call that never left. None where there is only one bus.
        self.elsewhere: Callable[[OutgoingCall, Result | None], None] | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a session that takes calls now."""
        return self._session is not None

    def __repr__(self) -> str:
        pending = len(self._session.pending) if self._session else 0
        return f"<OutgoingCalls pending={pending} waiting={len(self._waiting)} pausing={len(self._pausing)}>"

    def begin(self, out: OutgoingCall) -> None:
        """Sends a call now, or as soon as there is a connection with room for it."""
        if self._closed_reason:
            out.fail(Code.UNAVAILABLE, self._closed_reason, Stage.NOT_DISPATCHED)
        elif out.ended:
            pass
        elif out.parent_session is not None:  # a draining bus still takes it, so it waits before calls that it refuses
            if not self._send(out):
                self._waiting.appendleft(out)
                self._watch(out.soft_deadline)
        elif self._waiting or not self._send(out):
            self._waiting.append(out)
            self._watch(out.soft_deadline)

    def begin_many(self, calls: Iterable[OutgoingCall]) -> None:
        """Sends calls, in their order."""
        for out in calls:
            if (
                self._waiting
                or self._closed_reason
                or out.ended
                or out.parent_session is not None
                or not self._send(out)
            ):
                self.begin(out)

    def cancel_many(self, calls: Iterable[OutgoingCall]) -> None:
        """Cancels calls."""
        for out in calls:
            self.cancel(out)

    def cancel(self, out: OutgoingCall, reason: str = _CANCELLED) -> None:
        """Cancels a call for its caller; nothing is delivered any more."""
        if out.ended:
            return
        out.ended = True
        self._send_cancel(out, reason)

    def opened(self, session: PeerSession, arguments_bytes: int) -> None:
        """Takes a session that is open now, and sends the waiting calls."""
        self._session = session
        self._arguments_bytes = arguments_bytes
        # A character has at most 4 bytes; only calls that may be too large are measured.
        self._unmeasured = min(arguments_bytes, session.max_item_bytes) // 4
        self._send_waiting()

    def results(self, session: PeerSession, results: Iterable[pb.ToolResult]) -> None:
        """Delivers a frame's results, or retries the calls that they refuse."""
        pending = session.pending
        for message in results:
            out = pending.pop(message.call_id, None)
            if out is None or out.ended:
                continue  # it was cancelled or timed out here, or the id is unknown
            result = Result.from_wire(message)
            error = result.error
            if error is None:
                out.ended = True  # as `finish` does
                out.deliver(out, result)
            elif not (error.retry_safe and error.code in _RETRIED and self._retry_later(out, result)):
                out.finish(result)
        if self._waiting:
            self._send_waiting()

    def progress(self, session: PeerSession, items: Iterable[pb.ToolProgress]) -> None:
        """Delivers a frame's progress."""
        for message in items:
            out = session.pending.get(message.call_id)
            if out is not None and not out.ended:
                out.accepted = True
                if out.wants_progress:
                    out.deliver(out, Progress.from_wire(message))

    def lost(self, session: PeerSession, pending: Iterable[OutgoingCall], *, all_read: bool) -> None:
        """Handles the end of a session: calls that the bus cannot have read are retried on the next one.

        A nested call is not retried: on another session its parent's id is unknown, or the id of another user's call.

        Args:
            pending: the calls without a result, oldest first.
            all_read: whether the bus answered everything that it read, as it does before a graceful shutdown.
        """
        if self._session is session:
            self._session = None
        retried = []
        broke = f"the connection to the bus at {self._address} broke"
        parent_ended = f"{broke}, and with it the call that made this one"
        for out in list(self._waiting):
            if out.parent_session is not None:
                out.fail(Code.UNAVAILABLE, parent_ended, Stage.NOT_DISPATCHED)
        for out in pending:
            if out.ended:
                continue
            unread = all_read or out.frame > session.outbox.taken
            stage = Stage.NOT_DISPATCHED if unread else Stage.ACCEPTED if out.accepted else Stage.UNKNOWN
            if out.parent_session is not None:
                out.fail(Code.UNAVAILABLE, parent_ended if unread else f"{parent_ended}; {_MAY_HAVE_RUN}", stage)
            elif unread:
                retried.append(out)
            else:
                text = f"{broke} before the result of {out.name!r} came; {_MAY_HAVE_RUN}"
                if self.elsewhere is None:
                    out.fail(Code.UNAVAILABLE, text, stage)
                else:
                    error = CallError(Code.UNAVAILABLE, text, stage)
                    self.elsewhere(out, Result(out.call_id, is_error=True, error=error))
        self._waiting.extendleft(reversed(retried))
        if self.elsewhere is not None:
            for out in self.take_unsent():
                self.elsewhere(out, None)
        for out in retried:
            self._watch(out.soft_deadline)

    def take_unsent(self) -> list[OutgoingCall]:
        """Returns the calls that wait here to be sent, or sent again, and forgets them."""
        unsent = [out for out in (*self._waiting, *self._pausing) if not out.ended and out.parent_session is None]
        self._waiting = deque(out for out in self._waiting if out.parent_session is not None)
        self._pausing.clear()
        return unsent

    def close(self, reason: str, code: Code = Code.UNAVAILABLE) -> None:
        """Ends all calls, and those that are made later; the first reason stays."""
        self._closed_reason = self._closed_reason or reason
        pending: list[OutgoingCall] = list(self._session.pending.values()) if self._session else []
        for out in pending:
            if not out.ended:
                self._send_cancel(out, "closed")
                out.fail(code, reason, Stage.ACCEPTED if out.accepted else Stage.UNKNOWN)
        self._session = None
        for out in [*self._waiting, *self._pausing]:
            out.fail(code, reason, Stage.NOT_DISPATCHED)
        self._waiting.clear()
        self._pausing.clear()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def unfinished(self) -> int:
        """The number of calls whose callers still wait."""
        pending = self._session.pending.values() if self._session else ()
        return sum(not out.ended for out in [*pending, *self._waiting, *self._pausing])

    def _send(self, out: OutgoingCall) -> bool:
        """Puts a call into a frame; returns False if it has to wait."""
        session = self._session
        if out.parent_session is not None:
            if session is not out.parent_session or session.state is State.CLOSED:
                out.fail(Code.UNAVAILABLE, "the call that made this one has ended", Stage.NOT_DISPATCHED)
                return True
        elif session is None or not session.takes_calls:
            return False
        pending = session.pending
        if len(pending) >= session.max_in_flight:
            return False
        if (left := out.timeout) and (left := self._time_left(out, left)) <= 0.0:  # sent without time it could run
            self._expire(out)
            return True
        size = len(out.arguments_json) + OVERHEAD
        options = out.options
        if options.context is not None:
            size += options.size
        if size > self._unmeasured and self._too_large(session, out):
            return True
        outbox = session.outbox
        if size <= outbox.least <= outbox.space:  # as `room` does it, without a call
            outbox.space -= outbox.least
        else:
            outbox.room(size)
        call = outbox.add_call()
        call.call_id = out.call_id = call_id = next(self._ids)
        call.name = out.name
        call.arguments_json = out.arguments_json
        if options is not NO_OPTIONS:
            try:
                if left:
                    call.timeout_seconds = left
                options.fill(call)
            except (TypeError, ValueError) as problem:  # not only this call: it would break its whole message
                outbox.recall(outbox.opened, call_id)
                text = f"the options of the call of {out.name!r} cannot be sent: {problem}"
                out.fail(Code.INVALID_ARGUMENTS, text, Stage.NOT_DISPATCHED)
                return True
        pending[call_id] = out
        out.frame = outbox.opened
        if out.guard_deadline < self._timer_at:
            self._watch(out.guard_deadline)
        return True

    def _time_left(self, out: OutgoingCall, timeout: float) -> float:
        """Returns the timeout for the message: the caller's, without the time that the call has waited."""
        waited = self._loop.time() - out.started_at
        return timeout if waited < 0.005 else timeout - waited

    def _too_large(self, session: PeerSession, out: OutgoingCall) -> bool:
        """Ends a call that breaks a limit of the bus, which could end the stream; returns whether it did."""
        size = len(out.arguments_json.encode())
        limit = self._arguments_bytes
        if size > limit:
            rule = f"more than the limit arguments_bytes = {limit}: send less"
            text = f"the arguments of {out.name!r} have {size} bytes, {rule}"
            out.fail(Code.INVALID_ARGUMENTS, text, Stage.NOT_DISPATCHED, limit=("arguments_bytes", limit))
            return True
        size += out.options.size
        limit = session.max_item_bytes
        if size > limit:
            rule = f"more than one message to the bus holds ({limit}): send less context"
            text = f"the call of {out.name!r} has {size} bytes with its context, {rule}"
            out.fail(Code.INVALID_ARGUMENTS, text, Stage.NOT_DISPATCHED, limit=("message_bytes", limit))
            return True
        return False

    def _send_waiting(self) -> None:
        waiting = self._waiting
        while waiting and (waiting[0].ended or self._send(waiting[0])):
            waiting.popleft()

    def _retry_later(self, out: OutgoingCall, refusal: Result) -> bool:
        """Retries a refused call after a pause; returns False if its soft deadline is nearer."""
        assert refusal.error is not None  # only refusals come here
        longest = min(_MAX_PAUSE, _FIRST_PAUSE * 2 ** min(out.attempts, 10))
        pause = max(random.uniform(0.0, longest), refusal.error.retry_after_seconds)  # this order ignores NaN
        if self._loop.time() + pause >= out.soft_deadline:
            return False
        out.attempts += 1
        last = out.last_refusal.error if out.last_refusal is not None else None
        if last is None or refusal.error.stage >= last.stage:
            out.last_refusal = refusal
        self._pausing.add(out)
        self._loop.call_later(pause, self._retry, out)
        return True

    def _retry(self, out: OutgoingCall) -> None:
        if out in self._pausing:
            self._pausing.discard(out)
            if self.elsewhere is None:
                self.begin(out)
            else:
                self.elsewhere(out, None)

    def _send_cancel(self, out: OutgoingCall, reason: str) -> None:
        session = self._session
        if session is not None and out.call_id in session.pending:
            session.outbox.room(len(reason) + 64).cancels.add(call_id=out.call_id, reason=reason)
        self._pausing.discard(out)

    def _watch(self, moment: float) -> None:
        if moment < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = moment
            self._timer = self._loop.call_at(moment, self._sweep)

    def _sweep(self) -> None:
        """Ends the calls whose deadline has passed, and sets the timer for the next deadline."""
        now = self._loop.time()
        late = now - self._timer_at
        self._timer, self._timer_at = None, math.inf
        if late > LATE_SECONDS:  # this process stood still: results may wait in the socket and are read first
            self._watch(now + GUARD_SLACK)
            return
        for out in self._waiting:
            if not out.ended and out.soft_deadline <= now:
                self._expire(out)
        self._waiting = deque(out for out in self._waiting if not out.ended)
        pending: list[OutgoingCall] = list(self._session.pending.values()) if self._session else []
        for out in pending:
            if not out.ended and out.guard_deadline <= now:
                limit = ("timeout_seconds", out.timeout or MAX_TIMEOUT_SECONDS)
                text = f"the bus at {self._address} gave no answer within {limit[1]:g} s: it hangs or is overloaded"
                self._send_cancel(out, "timeout_seconds")
                stage = Stage.ACCEPTED if out.accepted else Stage.UNKNOWN
                out.fail(Code.DEADLINE_EXCEEDED, text, stage, limit=limit)
        deadlines = [out.soft_deadline for out in self._waiting]
        deadlines += [out.guard_deadline for out in pending if not out.ended]
        nearest = min(deadlines, default=math.inf)
        if nearest < math.inf:
            self._watch(max(nearest, now + SWEEP_PAUSE))

    def _expire(self, out: OutgoingCall) -> None:
        if out.last_refusal is not None:
            out.finish(out.last_refusal)
        elif self._session is not None and self._session.takes_calls:
            limit = self._session.max_in_flight
            text = f"this connection may have {limit} calls in flight, and all were taken: make fewer at once"
            out.fail(
                Code.OVERLOADED, text, Stage.NOT_DISPATCHED, retry_safe=True, limit=("calls_in_flight", float(limit))
            )
        else:
            text = self.unanswered(out.soft_deadline - out.started_at)
            out.fail(Code.UNAVAILABLE, text, Stage.NOT_DISPATCHED, retry_safe=True)

    def unanswered(self, seconds: float) -> str:
        """Returns the text that no bus answered within some seconds: its address, why, and how to fix it."""
        reason = f" ({self.no_bus_reason})" if self.no_bus_reason else ""
        return (
            f"no bus answered at {self._address} within {seconds:g} s{reason}: start one with `toolbus serve`, or "
            "name its address in TOOLBUS_ADDRESS"
        )


class BeginsCalls(Protocol):
    """Sends calls: a connection."""

    def begin(self, out: OutgoingCall) -> None:
        """Sends a call; its result comes through ``out.deliver``."""


def future_call(
    connection: BeginsCalls, name: str, arguments: Mapping[str, Any] | str | None, timeout: float | None
) -> Future[Result]:
    """Makes a call from any thread; the future's result is the call's, and a failed call is no exception.

    Raises:
        TypeError, ValueError: JSON cannot hold the arguments, or the timeout is not above 0.
    """
    future: Future[Result] = Future()
    connection.begin(OutgoingCall(name, dump_arguments(arguments), set_result, future, CallOptions(timeout)))
    return future


def set_result(out: OutgoingCall, result: Any) -> None:
    """Delivers the result of a call whose target is a future."""
    out.target.set_result(result)
