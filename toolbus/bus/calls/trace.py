"""Defines the trace of one call, as its handler reads it, and the span of an ended call."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from toolbus.bus.calls.call_record import Row
from toolbus.errors import CallError
from toolbus.v1 import tool_pb2 as pb

TRACE_BYTES = 64  # of a message, for a traceparent


class Trace:
    """The trace of one call. Plain slots, set by `CallTraces.begin`: it is made on the hot path.

    Attributes:
        traceparent: the span that the call's handler goes on from: the bus's own, or the caller's where it makes none.
        parent_id: the span that the call came from; "" where the trace begins here.
        tracestate: beside `traceparent`; may be empty.
        trace_id: 32 digits; "" where the trace is not sampled.
        recorded: whether the bus makes a span.
        sent: when the call was passed to its handler's connection, by the bus's clock; 0 before.
        first_sign: when the first progress came; 0 where none did.
    """

    __slots__ = ("first_sign", "parent_id", "recorded", "sent", "trace_id", "traceparent", "tracestate")

    traceparent: str
    parent_id: str
    tracestate: str
    trace_id: str
    recorded: bool
    sent: float
    first_sign: float

    def __repr__(self) -> str:
        return f"<Trace {self.traceparent}{' recorded' if self.recorded else ''}>"

    def fill(self, message: pb.ToolCall) -> None:
        """Sets the trace in a message towards a handler."""
        message.traceparent = self.traceparent
        if self.tracestate:
            message.tracestate = self.tracestate


SpanRow: TypeAlias = tuple[Trace, Row, str, bool, CallError | None]
"""A span as the hot path makes it, for `Span.of`: trace, the call's record, session, mcp, error."""


class Span(NamedTuple):
    """The span of one call that has ended. Times are seconds of the bus's monotonic clock.

    Attributes:
        traceparent: of the span itself, always sampled.
        parent_id: the span that made the call; "" where the trace begins with this one.
        name: of the tool, as listed; as the caller wrote it where the call was refused.
        source: whose tool it is; "" where the call was refused.
        id: the bus's own id of the call; "" where it was refused.
        session: that ran it; "" where its handler is not a session.
        mcp: whether the tool is a mounted MCP server's.
        sent, first_sign: as in `Trace`.
        error: None where it succeeded.
    """

    traceparent: str
    parent_id: str
    tracestate: str
    name: str
    source: str
    call_id: str
    id: str
    caller: str
    session: str
    mcp: bool
    started: float
    ended: float
    sent: float
    first_sign: float
    error: CallError | None

    @classmethod
    def of(cls, span_row: SpanRow) -> Span:
        """Builds the span from its row."""
        trace, row, session, mcp, error = span_row
        call_id, name, source, caller, started, ended, _, _, _, _, id, _ = row
        names = (name, source, call_id, id, caller, session)
        moments = (started, ended, trace.sent, trace.first_sign)
        return cls(trace.traceparent, trace.parent_id, trace.tracestate, *names, mcp, *moments, error)

    @property
    def trace_id(self) -> str:
        """The trace, 32 digits."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """The span itself, 16 digits."""
        return self.traceparent[36:52]
