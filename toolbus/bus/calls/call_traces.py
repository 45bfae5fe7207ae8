"""Decides which calls are traced and what their handlers read of the trace; makes the spans of those that have ended.

A call whose ``traceparent`` says sampled gets a span of the bus, as long as the bus records spans at all and has not
made too many in this second. All others cost one look at a field: their trace is passed on. Nothing here exports; a
taker gets the spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log, log1p
from random import SystemRandom, random

from toolbus.bus.calls.call import Call, SpanRow, Trace
from toolbus.protocol.limits import MAX_SPANS_PER_SECOND
from toolbus.protocol.traceparent import is_plain, read_traceparent, read_tracestate
from toolbus.v1 import tool_pb2 as pb

MAX_STEP = 1e15  # calls; with the smallest ratios a step would be infinite
IDS_AT_ONCE = 20  # random ones; one by one they take three times as long
_ODD = "13579bdf"  # the last digits of flags that say sampled


class CallTraces:
    """Decides which calls of one bus are traced, and hands their spans on.

    Attributes:
        take: takes spans; None: the bus records none.
        draw_at: the number of the next call that begins a trace of its own, as the dispatcher numbers calls.
        refused: how many calls were not sampled because there were too many in their second.
    """

    def __init__(self) -> None:
        self._ratio = 0.0
        self._step_scale = 0.0  # see `_step`
        self._most = 0
        self._second_ends = 0.0  # of the second in which calls are counted
        self._sampled = 0  # in this second
        self._random = SystemRandom()  # a tenth of the cost of the bytes of `random`, and ids that cannot be guessed
        self._fresh: list[str] = []  # traceparents with ids that nothing has yet
        # What `draw` writes into calls as their traceparent; no caller knows it.
        self._mark = self._random.randbytes(8).hex()
        self.take: Callable[[SpanRow], object] | None = None
        self.draw_at = inf
        self.refused = 0

    def __repr__(self) -> str:
        return f"<CallTraces ratio={self._ratio:g} refused={self.refused}{'' if self.take else ' off'}>"

    def start(self, take: Callable[[SpanRow], object], *, ratio: float = 0.0, most: int = MAX_SPANS_PER_SECOND) -> None:
        """Makes spans from now on.

        Args:
            take: takes each; it has to be fast, since it runs within the call.
            ratio: of the calls that bring no trace, how many begin one: from 0 to 1.
            most: calls that are sampled in a second; further ones are not, and say so to their handlers.
        """
        self.take, self._ratio, self._most = take, ratio, most
        self._step_scale = max(-MAX_STEP, 1.0 / log1p(-ratio)) if 0.0 < ratio < 1.0 else 0.0
        self.draw_at = 0 if ratio > 0 else inf  # the first message finds where the numbers are

    def stop(self) -> None:
        """Makes no more spans: the traces of calls are passed on as they are."""
        self.take, self.draw_at = None, inf

    def draw(self, calls: Sequence[pb.ToolCall], made: int) -> list[pb.ToolCall]:
        """Marks the calls of a message that are drawn, so that `begin` begins a trace: of those that bring none.

        Args:
            made: how many calls the dispatcher has numbered before them.

        Returns:
            Those that are drawn. While they are held, protobuf makes no second objects for them.
        """
        number, last, drawn = int(self.draw_at), made + len(calls), []
        if number <= made:
            number = made + self._step()
        while number <= last:
            call = calls[number - made - 1]
            if not call.traceparent:
                call.traceparent = self._mark
            drawn.append(call)
            number += self._step()
        self.draw_at = number
        return drawn

    def begin(
        self, text: str, call: pb.ToolCall, parent: Call | None, context: pb.CallContext | None, now: float
    ) -> Trace | None:
        """Returns the trace of a call; None where it has none.

        Args:
            text: the call's ``traceparent``.
            parent: the call that it is nested in.
            context: what the host states about the call; None for nested ones, which have their root's.
        """
        trace = Trace()
        trace.sent = trace.first_sign = 0.0
        if text == self._mark and parent is None and (context is None or not context.traceparent):
            text = (self._fresh or self._more_fresh()).pop()
            trace.traceparent = call.traceparent = text  # a caller that makes the call again stays in the trace
            trace.trace_id = text[3:35]
            trace.parent_id = trace.tracestate = ""
        else:
            tracestate = call.tracestate
            if not text or is_plain(text) is None:
                text, tracestate = self._inherited(text, call, parent, context)
                if not text:
                    return None
            sampled = text[54] in _ODD
            trace.parent_id = text[36:52]
            trace.tracestate = read_tracestate(tracestate) if tracestate else ""
            trace.trace_id = text[3:35] if sampled else ""
            if not sampled or self.take is None:
                trace.traceparent, trace.recorded = text, False
                return trace
            trace.traceparent = text[:36] + (self._fresh or self._more_fresh()).pop()[36:]
        if (self._sampled < self._most and now < self._second_ends) or self._next_second(now):
            self._sampled += 1
            trace.recorded = True
        else:  # too many in this second
            self.refused += 1
            trace.recorded, trace.traceparent = False, f"{trace.traceparent[:53]}00"
        return trace

    @staticmethod
    def _inherited(
        text: str, call: pb.ToolCall, parent: Call | None, context: pb.CallContext | None
    ) -> tuple[str, str]:
        """Returns the traceparent, in version 00, and tracestate of a call that has no plain one; empty for none."""
        came = read_traceparent(text)
        if came is not None:  # of a later version
            return came.text, call.tracestate
        if parent is not None:
            return ("", "") if parent.trace is None else (parent.trace.traceparent, parent.trace.tracestate)
        came = read_traceparent(context.traceparent) if context is not None else None
        return ("", "") if came is None else (came.text, call.tracestate)

    def _next_second(self, now: float) -> bool:
        """Begins another second where the last one has ended; returns whether it has."""
        if now < self._second_ends:
            return False
        self._second_ends, self._sampled = now + 1.0, 0
        return True

    def _more_fresh(self) -> list[str]:
        """Draws ids; that all digits of one are 0, which may not be, is as likely as two equal ids."""
        digits = self._random.randbytes(24 * IDS_AT_ONCE).hex()
        self._fresh = [f"00-{digits[at : at + 32]}-{digits[at + 32 : at + 48]}-01" for at in range(0, len(digits), 48)]
        return self._fresh

    def _step(self) -> int:
        """Returns how many calls further the next one is drawn: geometric, so that calls need no draw each."""
        if not self._step_scale:  # every call is drawn
            return 1
        return 1 + int(log(1.0 - random()) * self._step_scale)
