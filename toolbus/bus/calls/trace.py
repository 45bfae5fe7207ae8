"""Decides which calls are traced and what their handlers read of the trace; makes the spans of those that have ended.

A call whose ``traceparent`` says sampled gets a span of the bus, as long as the bus records spans at all and has not
made too many in this second. All others cost nothing but a look: what they bring is passed on. Nothing here exports;
a taker gets the spans.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from toolbus.questions import INPUT_REQUIRED
from toolbus.tool import CallError
from toolbus.traceparent import TraceContext, read_traceparent, read_tracestate
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:  # a call has a trace
    from toolbus.bus.calls.call import Call

TRACE_MOST = 100  # spans a second; a caller that samples everything would else fill the queue and the trace store


class Trace:
    """The trace of one call.

    Attributes:
        onward: the span that the call's handler goes on from: the bus's own, or the caller's where the bus makes none.
        parent_id: the span that the call came from; "" where the trace begins here.
        tracestate: beside `onward`; may be empty.
        trace_id: 32 digits; "" where the trace is not sampled.
        recorded: whether the bus makes a span.
        sent: when the call was passed to its handler's connection, by the bus's clock; 0 before.
        first_sign: when the first progress came; 0 where none did.
    """

    __slots__ = ("first_sign", "onward", "parent_id", "recorded", "sent", "trace_id", "tracestate")

    def __init__(self, onward: TraceContext, parent_id: str, tracestate: str, trace_id: str, recorded: bool) -> None:
        self.onward = onward
        self.parent_id = parent_id
        self.tracestate = tracestate
        self.trace_id = trace_id
        self.recorded = recorded
        self.sent = 0.0
        self.first_sign = 0.0

    def __repr__(self) -> str:
        return f"<Trace {self.onward.text}{' recorded' if self.recorded else ''}>"

    @property
    def size(self) -> int:
        """About how many bytes it takes in a message."""
        return len(self.onward.text) + len(self.tracestate) + 8

    def fill(self, message: pb.ToolCall) -> None:
        """Sets the trace in a message towards a handler."""
        message.traceparent = self.onward.text
        if self.tracestate:
            message.tracestate = self.tracestate


class Span(NamedTuple):
    """What the bus tells about one call that has ended. Times are seconds of its monotonic clock.

    Attributes:
        context: the span itself.
        parent_id: the span that made the call; "" where the trace begins with this one.
        name: of the tool, as listed; as the caller wrote it where the call was refused.
        source: whose tool it is; "" where the call was refused.
        id: the bus's own id of the call; "" where it was refused.
        session: that ran it; "" where its handler is none.
        mcp: whether the tool is a mounted MCP server's.
        sent, first_sign: as in `Trace`.
        code: 0 where it succeeded.
        error: None where it succeeded.
    """

    context: TraceContext
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
    code: int
    error: CallError | None


class CallTraces:
    """Who is traced, and what becomes of the spans.

    Attributes:
        draw_at: the number of the next call that begins a trace of its own, as the dispatcher numbers calls.
        refused: how many calls were not sampled because there were too many in their second.
    """

    def __init__(self) -> None:
        self._ratio = 0.0
        self._most = 0
        self._take: Callable[[Span], object] | None = None  # None: the bus records no spans
        self._second_ends = 0.0  # of the second in which calls are counted
        self._sampled = 0  # in this second
        self._roots: set[str] = set()  # what `draw` has written into the calls of the message at hand
        self.draw_at = math.inf
        self.refused = 0

    def __repr__(self) -> str:
        return f"<CallTraces ratio={self._ratio:g} refused={self.refused}{'' if self._take else ' off'}>"

    def start(self, take: Callable[[Span], object], *, ratio: float = 0.0, most: int = TRACE_MOST) -> None:
        """Makes spans from now on.

        Args:
            take: takes each; it has to be fast, since it runs within the call.
            ratio: of the calls that bring no trace, how many begin one: from 0 to 1.
            most: calls that are sampled in a second; further ones are not, and say so to their handlers.
        """
        self._take, self._ratio, self._most = take, ratio, most
        self.draw_at = 0 if ratio > 0 else math.inf  # the first message finds where the numbers are

    def stop(self) -> None:
        """Makes no more spans: what calls bring is passed on as it is."""
        self._take, self.draw_at = None, math.inf

    def draw(self, calls: Sequence[pb.ToolCall], made: int) -> None:
        """Lets the calls of a message that are drawn begin a trace, where they bring none and are not nested.

        Args:
            made: how many calls the dispatcher has numbered before them.
        """
        self._roots.clear()
        if self.draw_at <= made:
            self.draw_at = made + self._step()
        while self.draw_at <= made + len(calls):
            call = calls[int(self.draw_at) - made - 1]
            if not call.traceparent and not call.parent_call_id and not call.context.traceparent:
                call.traceparent = root = TraceContext.of(_random_id(128), _random_id(64), sampled=True).text
                self._roots.add(root)
            self.draw_at += self._step()

    def begin(self, call: pb.ToolCall, parent: Call | None, context: pb.CallContext | None, now: float) -> Trace | None:
        """Returns the trace of a call; None where it has none.

        Args:
            parent: the call that it is nested in.
            context: what the host states about the call; None for nested ones, which have their root's.
        """
        text = call.traceparent
        came = read_traceparent(text) if text else None
        if came is not None:
            tracestate = read_tracestate(call.tracestate)
        elif parent is not None:
            if parent.trace is None:
                return None
            came, tracestate = parent.trace.onward, parent.trace.tracestate
        elif context is not None and (came := read_traceparent(context.traceparent)) is not None:
            tracestate = read_tracestate(call.tracestate)
        else:
            return None
        if not came.sampled or self._take is None:
            return Trace(came, came.span_id, tracestate, came.trace_id if came.sampled else "", recorded=False)
        recorded = self._may_sample(now)
        own = TraceContext.of(came.trace_id, _random_id(64), sampled=recorded)
        parent_id = "" if text in self._roots else came.span_id
        return Trace(own, parent_id, tracestate, came.trace_id, recorded)

    def end(self, trace: Trace, call: Call, code: int, error: CallError | None, now: float) -> None:
        """Makes the span of a call that has ended."""
        if self._take is None or not trace.recorded:
            return
        entry, handler = call.entry, call.handler
        self._take(
            Span(
                *(trace.onward, trace.parent_id, trace.tracestate, entry.name, entry.source, call.call_id, call.id),
                caller=call.caller.source,
                # Only streams have one, and only mounts speak another protocol.
                session=getattr(handler, "session_id", ""),
                mcp=getattr(handler, "speaks_mcp", False),
                started=call.started,
                ended=now,
                sent=trace.sent,
                first_sign=trace.first_sign,
                code=0 if code == INPUT_REQUIRED else code,
                error=error,
            )
        )

    def refuse(self, trace: Trace, call: pb.ToolCall, caller: str, error: CallError, now: float) -> None:
        """Makes the span of a call that was refused; its name and id may be of any length, and are shortened."""
        if self._take is not None and trace.recorded:
            names = (call.name[:128], "", call.call_id[:128], "", caller, "")
            times = (now, now, 0.0, 0.0)
            self._take(Span(trace.onward, trace.parent_id, trace.tracestate, *names, False, *times, error.code, error))

    def _may_sample(self, now: float) -> bool:
        if now >= self._second_ends:
            self._second_ends, self._sampled = now + 1.0, 0
        self._sampled += 1
        if self._sampled <= self._most:
            return True
        self.refused += 1
        return False

    def _step(self) -> int:
        """Returns how many calls further the next one is drawn: geometric, so that calls need no draw each."""
        if self._ratio >= 1.0:
            return 1
        return 1 + int(math.log(1.0 - random.random()) / math.log1p(-self._ratio))


def _random_id(bits: int) -> str:
    while not (number := random.getrandbits(bits)):  # all zeros mean none
        pass
    return f"{number:0{bits // 4}x}"
