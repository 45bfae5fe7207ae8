"""Records how calls end: their records, the counts of their tools, their spans, and those that took long.

The dispatcher reports ended calls. It writes the records of plain successes itself, on the hot path, and comes here for
what is rare.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolbus.bus.access.identity import Identity
from toolbus.bus.calls.call import Call, Caller, Trace
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.calls.call_records import (
    MAX_TEXT,
    CallRecords,
    More,
    Row,
    content_of,
    failure_of,
    only_reads,
    origin_of,
)
from toolbus.bus.calls.call_traces import CallTraces
from toolbus.bus.calls.refusals import Refused
from toolbus.bus.catalog.argument_repair import notes_of, original_of, repairs_of
from toolbus.bus.catalog.entry import Entry, is_operators
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.metrics.call_counts import CallCounts, CallMetrics, outcome_of
from toolbus.common.log_limit import LogLimit
from toolbus.errors import CallError, UnknownRole
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS
from toolbus.v1 import tool_pb2 as pb

# The dispatcher compares when a call began with a moment that it looks up once for each message; only a slow call comes
# here. Calls that no caller waits for, tasks, and those by which operators look are not slow whatever they take.

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


class CallObserver:
    """Observes the calls of one bus as they end.

    Args:
        metrics: the counts of tools; None: calls are not counted.

    Attributes:
        records: the newest calls.
        traces: spans of sampled calls.
        slow_calls: those that took long.
        counts: whether calls are counted.
    """

    def __init__(self, registry: Registry, records: CallRecords, metrics: CallMetrics | None) -> None:
        self._registry = registry
        self._metrics = metrics
        self.counts = metrics is not None
        self.records = records
        self.slow_calls = SlowCalls()
        self.traces = CallTraces()

    def call_ended(self, call: Call, code: int, now: float, output: str = "", error: CallError | None = None) -> None:
        """Records how a call ended, with everything that the hot path leaves out.

        Args:
            output: the part that may be recorded.
        """
        entry, trace, arguments_json, context = call.entry, call.trace, call.arguments_json, call.context
        content = content_of(arguments_json, output) if self.records.contents else None
        failure = failure_of(error, texts=self.records.texts) if error is not None else None
        more = self.more(call)._replace(content=content, failure=failure)
        row = (
            *(call.call_id, entry.name, entry.source, call.caller.source, call.started, now, code),
            # As it came, and without the context, which counts towards what is held.
            *(len(original_of(arguments_json)), len(output)),
            *(origin_of(context) if context is not None else None, call.id, more),
        )
        if not only_reads(entry):
            self._count(entry, code, now, now - call.started)
            if call.started < now - self.slow_calls.seconds:
                self.slow_calls.note(call, code, now)
            self.records.add(row)
        if trace is not None and trace.recorded:
            self.span_ended(trace, call, (*row[:-1], None), error)

    @staticmethod
    def more(call: Call) -> More:
        """Returns the parts of a call's record that few have, without contents and failure."""
        parent, trace, arguments_json = call.parent, call.trace, call.arguments_json
        return More(
            repairs=repairs_of(arguments_json),
            parent=parent.id if parent is not None else "",
            trace_id=trace.trace_id if trace is not None else "",
            notes=notes_of(arguments_json),
        )

    def span_ended(self, trace: Trace, call: Call, row: Row, error: CallError | None = None) -> None:
        """Hands on the span of a call that has ended, and adds a counted call as an exemplar of its duration.

        Args:
            row: its record, without contents: spans wait by the thousand.
        """
        take, handler, entry = self.traces.take, call.handler, call.entry
        if take is not None:
            # Only streams have a session, and only mounts speak another protocol.
            mcp = getattr(handler, "speaks_mcp", False)
            take((trace, row, getattr(handler, "session_id", ""), mcp, error and _without_text(error)))
        if self._metrics is not None and not only_reads(entry):
            (entry.counts or self._first_counts(entry)).add_exemplar(trace.trace_id, row[5] - row[4], row[5])

    def call_refused(self, caller: Caller, call: pb.ToolCall, refused: Refused, now: float) -> None:
        """Records a call that was not sent, shortened: refused names and ids may be of any length."""
        code, traceparent = refused.error.code, call.traceparent
        context = call.context if "context" in call and caller.may_set_context else None
        more = self._refusal_record(refused, call.arguments_json)
        self.traces.draw_at -= 1  # it gets no number; otherwise as many calls after it would not be drawn
        trace = None
        if traceparent or call.parent_call_id or context is not None:
            trace = self.traces.begin(traceparent, call, caller.pending.get(call.parent_call_id), context, now)
            if trace is not None:
                more = more._replace(trace_id=trace.trace_id)
        row = (
            *(call.call_id[:MAX_TEXT], call.name[:MAX_TEXT], "", caller.source, now, now, code),
            *(len(call.arguments_json), 0, origin_of(context) if context is not None else None, "", more),
        )
        self._count_unsent(call.name, call.role, code, now)
        self.records.add(row)
        if trace is not None and trace.recorded and self.traces.take is not None:
            self.traces.take((trace, (*row[:-1], None), "", False, _without_text(refused.error)))

    def call_failed(self, caller: Caller, call_id: str, name: str, error: CallError, now: float) -> None:
        """Records a call that met a fault of the bus before it was sent."""
        self._count_unsent(name, "", error.code, now)
        more = More(failure=failure_of(error, texts=False))
        names = (call_id[:MAX_TEXT], name[:MAX_TEXT], "", caller.source)
        self.records.add((*names, now, now, error.code, 0, 0, None, "", more))

    # -- counts ----------------------------------------------------------------------------------------------------

    def count_run(self, entry: Entry, first: float, starts: list[float] | None, now: float) -> None:
        """Counts calls of one tool that ended well, in one frame; `starts` is None for one call."""
        counts = self._first_counts(entry) if entry.counts is None else entry.counts
        if starts is None:
            counts.add_one(first, now)
        else:
            counts.add_run(starts, now)

    def identity_called(self, identity: Identity, count: int) -> None:
        """Counts calls that were sent for an identity."""
        if self._metrics is not None:
            self._metrics.count_identity(identity.name, sent=count)

    def identity_limited(self, identity: Identity, count: int) -> None:
        """Counts calls that the quota of an identity refused."""
        if self._metrics is not None:
            self._metrics.count_identity(identity.name, limited=count)

    def _first_counts(self, entry: Entry) -> CallCounts:
        assert self._metrics is not None  # the callers check this
        entry.counts = counts = self._metrics.take(entry.source, entry.name)
        return counts

    def _count(self, entry: Entry, code: int, now: float, seconds: float | None) -> None:
        """Counts a call that ended in any way; without seconds it was never sent."""
        if self._metrics is not None:
            (entry.counts or self._first_counts(entry)).add(code, now, seconds)

    def _count_unsent(self, name: str, role: str, code: int, now: float) -> None:
        metrics = self._metrics
        if metrics is None:
            return
        metrics.refused[code] += 1
        try:
            entry = self._registry.find(name, role)
        except UnknownRole:
            entry = None
        if entry is None:
            metrics.unknown.add(code, now, None)
        else:
            self._count(entry, code, now, None)

    def _refusal_record(self, refused: Refused, arguments_json: str) -> More:
        contents = self.records.contents
        if refused.record is None:  # one refusal may serve many calls
            refused.record = More(failure=failure_of(refused.error, texts=self.records.texts))
        return refused.record._replace(content=content_of(arguments_json, "")) if contents else refused.record


def _without_text(error: CallError) -> CallError:
    """Returns an error as a span has it: its texts may be as large as a result, and spans wait by the thousand."""
    return CallError(error.code, "", error.stage, error.retry_safe)
