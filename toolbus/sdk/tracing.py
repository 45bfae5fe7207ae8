"""Makes spans of calls and tools in programs that have imported OpenTelemetry; it never imports it itself.

A host's call is a span of kind CLIENT, a plugin's tool one of kind SERVER. Without a sampled trace no span is made: the
flag is read first, since a span that is not recorded costs as much as a call. Without OpenTelemetry each call costs one
look-up in `sys.modules`, and each message of calls another.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any, Protocol

from toolbus.common.version import VERSION
from toolbus.errors import Code, Stage
from toolbus.functions.call_context import CallOptions
from toolbus.protocol.span_names import (
    SCOPE,
    Attributes,
    call_attributes,
    call_id_attributes,
    execute_name,
    failure_attributes,
)
from toolbus.protocol.tool import CallError, Result
from toolbus.protocol.traceparent import TraceContext, is_tracestate, read_traceparent, read_tracestate
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.sdk.tracing")

API = "opentelemetry.trace"  # the name of the module where a program has imported it
_SAMPLED = 1  # the flag of W3C trace context


def find_api() -> Any:
    """Returns OpenTelemetry's module `trace` if this program has imported it; else None."""
    return sys.modules.get(API)


class CallSpan:
    """The trace of one call that this program makes.

    Attributes:
        traceparent, tracestate: what the call carries.
    """

    __slots__ = ("_api", "_span", "traceparent", "tracestate")

    def __init__(self, api: Any, span: Any, context: Any) -> None:
        self._api = api
        self._span = span  # None if the trace is passed on and no span is recorded
        self.traceparent = _text_of(context)
        self.tracestate = read_tracestate(context.trace_state.to_header())

    def __repr__(self) -> str:
        return f"<CallSpan {self.traceparent}{'' if self._span is None else ' recorded'}>"

    def carried(self, options: CallOptions) -> CallOptions:
        """Returns the options of the call with its trace."""
        return options._replace(traceparent=self.traceparent, tracestate=self.tracestate)

    def end(self, call_id: str, result: Result | None) -> None:
        """Ends the span.

        Args:
            call_id: of the latest attempt; empty before the first.
            result: None if the caller did not wait for it.
        """
        if self._span is not None:
            if result is None:
                error: CallError | None = CallError(Code.CANCELLED, "", Stage.UNKNOWN)
            else:
                error = _error_of(result)
            _end(self._api, self._span, call_id_attributes(call_id), error)

    def enter(self) -> Any:
        """Returns a context manager in which the span is the current one."""
        span = self._api.get_current_span() if self._span is None else self._span
        return self._api.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False)


class CallToTrace(Protocol):
    """A call that is not sent yet."""

    name: str
    options: CallOptions


def begin_call(call: CallToTrace) -> CallSpan | None:
    """Begins the span of a call and adds it to the call; None if the program has no trace and begins none."""
    span = begin_span(call.name)
    if span is not None:
        call.options = span.carried(call.options)
    return span


def begin_span(name: str) -> CallSpan | None:
    """Begins the span of a call of a tool; None if the program has no trace and begins none."""
    api = sys.modules.get(API)
    if api is None:
        return None
    try:
        current = api.get_current_span().get_span_context()
        if current.is_valid and not current.trace_flags & _SAMPLED:
            return CallSpan(api, None, current)
        if (tracer := _find_tracer(api)) is None:
            return CallSpan(api, None, current) if current.is_valid else None
        span = tracer.start_span(execute_name(name), kind=api.SpanKind.CLIENT, attributes=call_attributes(name, ""))
        context = span.get_span_context()
        return CallSpan(api, span if span.is_recording() else None, context) if context.is_valid else None
    except Exception as fault:
        _log_fault(fault)
        return None


async def in_span(call: pb.ToolCall, make: Callable[[], Awaitable[Result]]) -> Result:
    """Makes a call to a tool in the same process; the tool's spans are below the call's.

    Args:
        call: gets the trace of the program, if it has one.
        make: makes the call, and gives it an id if it has none.
    """
    span = begin_span(call.name)
    if span is None:
        return await make()
    call.traceparent, call.tracestate = span.traceparent, span.tracestate
    result: Result | None = None
    try:
        with span.enter():
            result = await make()
    finally:
        span.end(call.call_id, result)
    return result


def carried(options: CallOptions) -> CallOptions:
    """Returns the options of a nested call with the current span, if there is one."""
    api = sys.modules.get(API)
    context = None if api is None else _current(api)
    if context is None:
        return options
    state = read_tracestate(context.trace_state.to_header())
    return options._replace(traceparent=_text_of(context), tracestate=state)


def _current(api: Any) -> Any:
    try:
        context = api.get_current_span().get_span_context()
    except AttributeError:  # another thread is still importing it
        return None
    return context if context.is_valid else None


class ToolSpan:
    """The trace of one call that this program answers."""

    __slots__ = ("_api", "_records", "_span")

    def __init__(self, api: Any, span: Any, records: bool) -> None:
        self._api = api
        self._span = span
        self._records = records

    def __repr__(self) -> str:
        return f"<ToolSpan {self._span!r}>"

    def context(self) -> Context:
        """Returns a copy of the current context in which this span is the current one."""
        context = copy_context()
        self.attach(context)
        return context

    def attach(self, context: Context) -> None:
        """Makes this span the current one of a context."""
        context.run(_attach, self._api, self._span)

    def end(self, outcome: str | Result) -> None:
        """Ends the span with the outcome of the handler."""
        if self._records:
            _end(self._api, self._span, {}, None if isinstance(outcome, str) else _error_of(outcome))


def begin_tool(api: Any, call: pb.ToolCall) -> ToolSpan | None:
    """Begins the span of a tool that answers a call; None if the call has no trace or nothing records spans.

    A trace that is not sampled gets no span of its own. It still becomes the current trace, so that the handler's own
    spans are not sampled either.
    """
    text = call.traceparent
    trace = read_traceparent(text) if text else None
    try:
        if trace is None or (tracer := _find_tracer(api)) is None:
            return None
        remote = api.NonRecordingSpan(_context_of(api, trace, call.tracestate))
        if not trace.sampled:
            return ToolSpan(api, remote, records=False)
        span = tracer.start_span(
            execute_name(call.name),
            context=api.set_span_in_context(remote),
            kind=api.SpanKind.SERVER,
            attributes=call_attributes(call.name, call.request_id, id=call.call_id),
        )
        return ToolSpan(api, span, records=span.is_recording())
    except Exception as fault:
        _log_fault(fault)
        return None


def _find_tracer(api: Any) -> Any:
    """Returns the program's tracer; None if the program has set up no provider that records spans."""
    provider = api.get_tracer_provider()
    return None if isinstance(provider, api.ProxyTracerProvider) else _tracer_of(provider)


@functools.lru_cache(maxsize=1)  # a program has one provider, and asking it takes longer than a call
def _tracer_of(provider: Any) -> Any:
    return provider.get_tracer(SCOPE, VERSION)


def _context_of(api: Any, trace: TraceContext, tracestate: str) -> Any:
    flags = api.TraceFlags(_SAMPLED if trace.sampled else 0)
    state = api.TraceState.from_header([tracestate]) if tracestate and is_tracestate(tracestate) else None
    return api.SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), True, flags, state)


def _text_of(context: Any) -> str:
    sampled = bool(context.trace_flags & _SAMPLED)
    return TraceContext.of(f"{context.trace_id:032x}", f"{context.span_id:016x}", sampled=sampled).text


def _attach(api: Any, span: Any) -> None:
    sys.modules["opentelemetry.context"].attach(api.set_span_in_context(span))


def _error_of(result: Result) -> CallError | None:
    if result.error is None and result.is_error:
        return CallError(Code.TOOL, "", Stage.ACCEPTED)
    return result.error


def _end(api: Any, span: Any, attributes: Attributes, error: CallError | None) -> None:
    try:
        if error is not None:
            attributes = attributes | failure_attributes(error)
            span.set_status(api.Status(api.StatusCode.ERROR))
        if attributes:
            span.set_attributes(attributes)
        span.end()
    except Exception as fault:
        _log_fault(fault)


def _log_fault(fault: Exception) -> None:
    """Logs a fault of the program's own samplers and processors, which run within spans; the call goes on."""
    if not isinstance(fault, AttributeError):  # another thread is still importing OpenTelemetry
        _log_once(f"{type(fault).__name__}: {fault}")


@functools.lru_cache(maxsize=100)  # logs each fault once
def _log_once(fault: str) -> None:
    log.warning("a call has no span, since OpenTelemetry in this program failed: %s", fault)
