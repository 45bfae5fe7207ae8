"""Holds every call in flight on one bus, by caller, with the bytes held for it and when the next deadline passes.

The parts that begin, follow and end calls share one of these; it changes no call by itself.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable

from toolbus.bus.calls.call import Call, Caller
from toolbus.bus.calls.call_record import only_reads
from toolbus.errors import Stage


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

    def arm(self, when: float) -> None:
        """Has calls swept at a moment, unless that is done earlier anyway."""
        if when < self.armed_at:
            self.armed_at = when
            self._arm(when)
