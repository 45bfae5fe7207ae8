"""Ends calls otherwise than by their result: cancelled, too late, abandoned by their caller, lost with their handler.

A call that its handler may still run is cancelled there and keeps its slot until the handler confirms. One whose
handler is lost runs again on another handler where that is safe.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable

from toolbus.bus.calls.call import Call, Caller
from toolbus.bus.calls.call_observer import CallObserver
from toolbus.bus.calls.call_records import only_reads
from toolbus.bus.calls.refusals import no_room
from toolbus.bus.catalog.entry import Handler
from toolbus.errors import CallError, Code, Stage
from toolbus.protocol.tool import Result
from toolbus.v1 import tool_pb2 as pb


# The parts that begin, follow and end calls share one of these; it changes no call by itself.
class CallsInFlight:
    """The calls in flight. Handlers and callers have tables of their own; this has the totals.

    Args:
        arm: called with the time of the next deadline whenever it comes nearer: calls are to be swept then.

    Attributes:
        callers: those that have had calls since the last sweep.
        held: bytes of arguments held for all calls.
        ended_early: the stuck calls: ended for their caller, they keep a slot until their handler confirms.
        soft_deadlines: when a call becomes a task.
        retried: calls retried on another handler → how far the first one had got.
        armed_at: when the next sweep is due.
    """

    __slots__ = ("_arm", "armed_at", "callers", "ended_early", "held", "retried", "soft_deadlines")

    def __init__(self, arm: Callable[[float], None]) -> None:
        self._arm = arm
        self.armed_at = math.inf
        self.callers: dict[Caller, None] = {}
        self.held = 0
        self.ended_early: set[Call] = set()
        self.soft_deadlines: dict[Call, float] = {}
        self.retried: dict[Call, Stage] = {}

    def __repr__(self) -> str:
        return f"<CallsInFlight active={self.active} stuck={self.stuck} held={self.held}>"

    @property
    def active(self) -> int:
        """How many calls have a caller that waits."""
        return sum(len(caller.in_flight) for caller in self.callers)

    @property
    def stuck(self) -> int:
        """How many calls have ended for their caller and keep a slot until their handler confirms."""
        return len(self.ended_early)

    def oldest(self, limit: int) -> list[Call]:
        """Returns the calls whose callers wait longest, the oldest first, without those that read records.

        Looks at each caller and at about ``limit`` calls: a caller's are in the order in which they began, but for
        those that became tasks.
        """
        of_callers = (
            (call for call in caller.in_flight.values() if not only_reads(call.entry)) for caller in self.callers
        )
        return list(itertools.islice(heapq.merge(*of_callers, key=lambda call: call.started), limit))

    def find(self, own_id: str) -> Call | None:
        """Returns the call that has one of the bus's own ids, while its caller waits; looks at every call."""
        of_callers = (call for caller in self.callers for call in caller.in_flight.values())
        return next((call for call in of_callers if call.id == own_id), None)

    def count_by_source(self, limit: int) -> tuple[Counter[str], Counter[str]]:
        """Counts calls in flight, and those that are stuck, by the source of their tools; of about ``limit`` calls."""
        in_flight = (call for caller in self.callers for call in caller.in_flight.values())
        counted = Counter(call.entry.source for call in itertools.islice(in_flight, limit))
        return counted, Counter(call.entry.source for call in itertools.islice(self.ended_early, limit))

    def stage(self, call: Call) -> Stage:
        """Returns how far a call has got."""
        if call.accepted:
            return Stage.ACCEPTED
        stage: Stage = max(call.handler.stage(call), self.retried.get(call, Stage.NOT_DISPATCHED))
        return stage

    def leave_caller(self, call: Call) -> None:
        """Takes a call from the table of its caller, who waits no longer."""
        call.caller.in_flight.pop(call.call_id, None)
        self.soft_deadlines.pop(call, None)

    def free(self, call: Call) -> None:
        """Frees what was held for a call that no handler runs any more; it has left its handler's table."""
        call.handler.slots.release(call.caller.budget, 1)
        self.held -= call.size
        call.caller.budget.held -= call.size
        if call.parent is not None:
            call.leave_parent()
        if not call.active:
            call.handler.stuck -= 1
            self.ended_early.discard(call)

    def hand_over(self, call: Call, other: Handler) -> None:
        """Moves a call and its slot to another handler, which is to run it or holds it; sends nothing."""
        call.handler.pending.pop(call.id, None)
        call.handler.slots.release(call.caller.budget, 1)
        other.slots.take(call.caller.budget, 1)
        call.handler = other
        other.pending[call.id] = call

    def arm(self, when: float) -> None:
        """Has calls swept at a moment, unless that is done earlier anyway."""
        if when < self.armed_at:
            self.armed_at = when
            self._arm(when)


class CallEndings:
    """Ends calls early.

    Args:
        stuck_seconds: as in `Timings`.
    """

    def __init__(self, in_flight: CallsInFlight, observer: CallObserver, *, stuck_seconds: float) -> None:
        self._in_flight = in_flight
        self._observer = observer
        self._stuck_seconds = stuck_seconds

    def abandon(
        self,
        call: Call,
        code: Code,
        message: str,
        now: float,
        *,
        reason: str,
        limit: tuple[str, float] | None = None,
        answer: bool = True,
    ) -> None:
        """Ends a call for its caller, by deadline or cancel, while its handler still runs it.

        Args:
            reason: for the handler.
            limit: the one that the call exceeded.
            answer: whether the caller is still there.
        """
        if not call.active:
            return
        stage, safe = self._reached(call)
        self._in_flight.leave_caller(call)
        if call.handler.cancel(call, reason):
            call.handler.pending.pop(call.id, None)
            self._in_flight.free(call)
            call.active = False
        else:
            call.active = False
            call.handler.stuck += 1
            self._in_flight.ended_early.add(call)
            call.freed_at = now + self._stuck_seconds
            self._in_flight.arm(call.freed_at)
        self._finish(call, CallError(code, message, stage=stage, retry_safe=safe, limit=limit), now, answer=answer)

    def _reached(self, call: Call) -> tuple[Stage, bool]:
        """Returns how far a call has got, and whether a retry is safe."""
        stage = self._in_flight.stage(call)
        return stage, stage is Stage.NOT_DISPATCHED or call.declaration.tool.repeatable

    def _finish(self, call: Call, error: CallError, now: float, *, answer: bool = True) -> None:
        self.end_children(call, now)
        if answer:
            call.caller.deliver_result(call.call_id, Result(call.call_id, is_error=True, error=error).to_wire())
        self._observer.call_ended(call, error.code, now, error=error)

    def end_children(self, call: Call, now: float) -> None:
        """Cancels the calls that a call has made and that are still in flight."""
        children, call.children = call.children, None  # each removes itself from the list
        for child in children or ():
            message = "the call that made this one has ended"
            self.abandon(child, Code.CANCELLED, message, now, reason="parent ended")

    # -- by the caller -----------------------------------------------------------------------------------------------

    def cancels(self, caller: Caller, cancels: Iterable[pb.ToolCancel], now: float) -> None:
        """Cancels calls for their caller; a call that has ended already is ignored."""
        for cancel in cancels:
            call = caller.in_flight.get(cancel.call_id)
            if call is not None:
                reason = cancel.reason[:200] or "cancelled"
                message = f"the caller cancelled the call: {reason}"
                self.abandon(call, Code.CANCELLED, message, now, reason=reason)

    def cancel_for_operator(self, call: Call, now: float) -> None:
        """Cancels a call for an operator; the error that its caller gets says so."""
        message = "an operator cancelled the call"
        self.abandon(call, Code.CANCELLED, message, now, reason="an operator cancelled it")

    def caller_ended(self, calls: Iterable[Call], now: float) -> None:
        """A caller disconnected: its calls are cancelled at their handlers, without an answer."""
        for call in calls:
            self.abandon(call, Code.CANCELLED, "the caller disconnected", now, reason="caller gone", answer=False)
            self._in_flight.callers.pop(call.caller, None)

    def take_back(self, call: Call, why: str, now: float) -> None:
        """Cancels a call of a caller whose session ends after a drain: the caller still gets the result."""
        self.abandon(call, Code.CANCELLED, f"the caller's session ended: {why}", now, reason="caller gone")

    def end_all(self, now: float) -> None:
        """Ends what is still in flight when the bus stops: calls of programs and functions of this process."""
        for caller in list(self._in_flight.callers):
            for call in list(caller.in_flight.values()):
                self.abandon(call, Code.UNAVAILABLE, "the bus stopped", now, reason="the bus stopped")

    # -- with the handler ----------------------------------------------------------------------------------------------

    def handler_ended(self, pending: Iterable[Call], why: str, now: float) -> None:
        """A handler disconnected: its calls are retried on another handler where that is safe, otherwise they end.

        Args:
            pending: its calls; the handler's own table is empty already.
        """
        for call in pending:
            if not call.active:
                if call in self._in_flight.ended_early:  # else it has just ended with its parent, before it was sent
                    self._in_flight.free(call)
                continue
            stage, safe = self._reached(call)
            other = _other_handler(call, now) if safe else None
            if other is not None:
                self._move(call, other, stage, now)
                continue
            error = CallError(Code.UNAVAILABLE, _lost(call, why, safe=safe), stage=stage, retry_safe=safe)
            self.refuse(call, error, now)

    def refuse(self, call: Call, error: CallError, now: float) -> None:
        """Ends a call that no handler runs: it was never sent, or its handler has gone."""
        call.handler.pending.pop(call.id, None)
        self._in_flight.free(call)
        call.active = False
        self._in_flight.leave_caller(call)
        self._finish(call, error, now)

    def send_on(self, call: Call, now: float) -> None:
        """Sends a call that an interceptor has held to a handler with room, or ends it where there is none."""
        other = _other_handler(call, now)
        if other is not None:
            self._move(call, other, Stage.NOT_DISPATCHED, now)
            return
        declaration = call.entry.declarations.get(call.declaration.tool.schema_hash) or call.declaration
        self.refuse(call, no_room(call.entry, declaration, call.caller).error, now)

    def handler_hangs(self, handler: Handler, why: str, now: float) -> None:
        """A handler is connected and answers no heartbeat: its calls are retried elsewhere where that is safe, or end.

        Each is cancelled at the handler, which may go on later. One that ends keeps its slot until then.
        """
        for call in list(handler.pending.values()):
            if not call.active:
                continue
            stage, safe = self._reached(call)
            other = _other_handler(call, now) if safe else None
            if other is None:
                self.abandon(call, Code.UNAVAILABLE, _lost(call, why, safe=safe), now, reason="no heartbeat")
                continue
            handler.cancel(call, "no heartbeat")
            self._move(call, other, stage, now)

    def _move(self, call: Call, other: Handler, stage: Stage, now: float) -> None:
        """Sends a call to another handler."""
        self.end_children(call, now)  # they belong to the run that was lost
        if stage is not Stage.NOT_DISPATCHED:
            self._in_flight.retried[call] = stage
        self._in_flight.hand_over(call, other)
        call.accepted = False
        other.send([call], now)


def _other_handler(call: Call, now: float) -> Handler | None:
    """Returns a handler that declares the tool of a call in the same way and has room for it now."""
    same = call.entry.declarations.get(call.declaration.tool.schema_hash)
    other = same.pick() if same is not None and now < call.deadline else None
    return other if other is not None and call.size * 4 <= other.max_item_bytes else None


def _lost(call: Call, why: str, *, safe: bool) -> str:
    """Returns the text that the handler of a call was lost."""
    text = f"tool {call.entry.name!r} was lost: {why}"
    return text if safe else f"{text}; it may have run, so it was not tried again"
