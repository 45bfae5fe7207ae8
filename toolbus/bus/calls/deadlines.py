"""Ends calls whose deadline has passed, and makes tasks of those that have reached their soft deadline.

One sweep over all calls in flight runs when the nearest deadline passes, instead of a timer for each call.
"""

from __future__ import annotations

import logging
import math

from toolbus.bus.calls.call import Background, Call, MakeCalls
from toolbus.bus.calls.call_endings import CallEndings
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.calls.calls_in_flight import CallsInFlight
from toolbus.errors import Code

log = logging.getLogger("toolbus.calls")

SWEEP_PAUSE = 0.005  # a sweep looks at every call in flight, so many short limits share one


class Deadlines:
    """The deadlines of the calls in flight.

    Args:
        calls: makes calls again, for tasks that got answers.

    Attributes:
        background: takes calls over at their soft deadline; None: callers wait to the end.
    """

    def __init__(
        self, in_flight: CallsInFlight, endings: CallEndings, calls: MakeCalls, background: Background | None
    ) -> None:
        self._in_flight = in_flight
        self._endings = endings
        self._calls = calls
        self.background = background

    def sweep(self, now: float) -> None:
        """Ends calls whose deadline has passed, and arms the next sweep."""
        everything, nearest = self._in_flight, math.inf
        for call in list(everything.ended_early):
            if call.freed_at > now:
                nearest = min(nearest, call.freed_at)
            elif call.handler.pending.pop(call.id, None) is call:
                everything.free(call)
        everything.retried = {call: stage for call, stage in everything.retried.items() if call.active}
        for call, soft_deadline in list(everything.soft_deadlines.items()):
            if soft_deadline > now:
                nearest = min(nearest, soft_deadline)
            elif everything.soft_deadlines.pop(call, None) is not None and now < call.deadline:
                self.to_background(call, now)
        for caller in list(everything.callers):
            for call in list(caller.in_flight.values()):
                idle = call.declaration.tool.idle_timeout_seconds
                if call.deadline <= now:
                    self._exceeded(call, "timeout_seconds", call.timeout, now)
                elif idle and call.idle_deadline <= now:
                    self._exceeded(call, "idle_timeout_seconds", idle, now)
                else:
                    nearest = min(nearest, call.deadline, call.idle_deadline if idle else math.inf)
            if not caller.in_flight:
                del everything.callers[caller]
        everything.armed_at = math.inf
        nearest = min([nearest, *(call.freed_at for call in everything.ended_early)])
        if nearest < math.inf:
            everything.arm(max(nearest, now + SWEEP_PAUSE))

    def to_background(self, call: Call, now: float) -> None:
        """Answers a call at its soft deadline, and lets it go on as a task of the background."""
        adopted = None
        try:
            if self.background is not None:
                adopted = self.background.adopt(call, now, self._endings.cancels, self._calls)
        except Exception:  # the sweep must go on: it times out every other call too
            names = call.call_id, call.entry.name, call.entry.source
            log.exception("a fault of the bus: a call became no task", extra=call_fields(*names, call.caller.principal))
        if adopted is None:  # the caller waits on, within the longest timeout
            call.timeout = min(call.timeout, call.caller.longest_timeout)
            call.deadline = min(call.deadline, call.started + call.timeout)
            return
        caller, call_id = call.caller, call.call_id
        del caller.in_flight[call_id]
        caller.budget.held -= call.size
        call.handler.slots.release(caller.budget, 1)
        call.caller, call.call_id, envelope = adopted
        call.caller.budget.held += call.size
        call.handler.slots.take(call.caller.budget, 1)
        call.caller.in_flight[call.call_id] = call
        self._in_flight.callers[call.caller] = None
        caller.deliver_result(call_id, envelope.to_wire())

    def _exceeded(self, call: Call, limit: str, value: float, now: float) -> None:
        waited = now - call.started
        what = "no progress of" if limit == "idle_timeout_seconds" else "no result from"
        message = f"{what} tool {call.entry.name!r} within {value:g} s (waited {waited:.1f} s; limit {limit})"
        self._endings.abandon(call, Code.DEADLINE_EXCEEDED, message, now, reason=limit, limit=(limit, value))
