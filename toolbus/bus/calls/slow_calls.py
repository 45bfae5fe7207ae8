"""Notes calls that took long: the newest of them for operators, and a line in the log for each, up to a bound.

The dispatcher compares when a call began with a moment that it looks up once for each message; only a slow call comes
here. Calls that no caller waits for, tasks, and those by which operators look are not slow whatever they take.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolbus.bus.calls.call import Call
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.catalog.handler import is_operators
from toolbus.bus.metrics.call_counts import outcome_of
from toolbus.log_limit import LogLimit
from toolbus.tool import MAX_TIMEOUT_SECONDS

log = logging.getLogger("toolbus.calls")

MAX_STORED = 500
LINES_PER_SECOND = 10


@dataclass(frozen=True, slots=True)
class SlowCall:
    """One call that took long. Times are seconds of the bus's monotonic clock.

    Attributes:
        fields: those of its line in the log, `call_fields`.
        id: the bus's own id of the call, as its record has it.
    """

    id: str
    caller: str
    ended: float
    seconds: float
    fields: dict[str, Any]

    def described(self, began: float) -> dict[str, Any]:
        """Returns it as a JSON object.

        Args:
            began: added to its times, makes them seconds since the epoch.
        """
        return {"id": self.id, "caller": self.caller, "ended": round(began + self.ended, 3), **self.fields}


class SlowCalls:
    """The newest calls that took long; none until `watch`.

    Attributes:
        seconds: what counts as long; inf where nothing does.
        count: how many there were.
    """

    def __init__(self) -> None:
        self.seconds = math.inf
        self.count = 0
        self._newest: deque[SlowCall] = deque(maxlen=MAX_STORED)
        self._limit: LogLimit | None = None  # None until watched

    def __repr__(self) -> str:
        return f"<SlowCalls seconds={self.seconds:g} count={self.count}>"

    def watch(self, seconds: float, later: Callable[[float, Callable[[], None]], object]) -> None:
        """Notes calls from now on.

        Args:
            seconds: what counts as long; 0: nothing does.
            later: calls a function after so many seconds.
        """
        self.seconds = seconds or math.inf
        self._limit = LogLimit(LINES_PER_SECOND, self._log_more, later)

    def note(self, call: Call, code: int, now: float) -> None:
        """Notes a call that has ended, and logs it."""
        # A task has a caller of its own, with a timeout that no caller who waits has.
        if is_operators(call.entry.source) or call.caller.longest_timeout > MAX_TIMEOUT_SECONDS:
            return
        self.count += 1
        seconds, trace = now - call.started, call.trace
        fields = call_fields(
            *(call.call_id, call.entry.name, call.entry.source, call.caller.principal),
            trace_id=trace.trace_id if trace is not None else "",
            seconds=seconds,
            outcome=outcome_of(code),
        )
        self._newest.append(SlowCall(call.id, call.caller.source, now, seconds, fields))
        if self._limit is not None and self._limit.passes():
            log.warning("slow call", extra=fields)

    def slowest(self, limit: int, since: float = -math.inf) -> list[SlowCall]:
        """Returns those that took longest, slowest first.

        Args:
            since: only calls that ended later, by the bus's clock.
        """
        newer = [each for each in self._newest if each.ended > since]
        return sorted(newer, key=lambda each: each.seconds, reverse=True)[: max(0, limit)]

    @staticmethod
    def _log_more(lines: int) -> None:
        log.warning("and %d more slow calls: `toolbus calls --slow` shows the slowest", lines)
