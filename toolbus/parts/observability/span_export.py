"""Exports finished spans to a collector of OpenTelemetry, on a thread of its own.

The bus's loop only puts a tuple into a bounded queue. The thread builds the spans and sends them; a collector that is
slow or dead costs spans, which are counted, and nothing else. Needs the extra ``toolbus[otel]``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import requests
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from toolbus.bus.calls.call import Span, SpanRow
from toolbus.bus.loopback import mask
from toolbus.common.text import clean_line, shorten
from toolbus.protocol import span_names
from toolbus.protocol.traceparent import is_tracestate

log = logging.getLogger("toolbus.traces")

MAX_WAITING = 10_000  # spans, some 10 MB
MAX_BATCH = 512  # spans of one request
EXPORT_SECONDS = 5.0  # for one request with its retries
LONGEST_PAUSE = 30.0  # after requests that failed
STOP_SECONDS = 2.0  # for the queue when the bus stops
MAX_WHY = 300  # characters of an error of the exporter
_OTEL_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
# Variables that name what makes the exporter's sessions, in place of ours.
_SESSION_MAKERS = tuple(f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{kind}CREDENTIAL_PROVIDER" for kind in ("TRACES_", ""))
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _Session(requests.Session):  # type: ignore[misc]  # it has no types
    """Sends requests to the collector: follows no redirect, and stores why the last one failed.

    The exporter takes a redirect for a success, and the spans would be lost; earlier versions follow it, to a place
    that nobody configured. Of a request that it repeats it knows only that the time is over.

    Attributes:
        fault: of the last request; "" where the collector took the spans.
    """

    fault = ""

    def request(self, *args: Any, **options: Any) -> Any:
        try:
            response = super().request(*args, **(options | {"allow_redirects": False}))
        except requests.RequestException as error:
            root: BaseException = error
            while root.__context__ is not None:  # requests wraps the error of the socket three times
                root = root.__context__
            self.fault = f"{type(root).__name__}: {root}"
            raise
        place = response.headers.get("location") if response.status_code < 400 else None
        fault = f"HTTP {response.status_code} {response.reason or ''}".strip()
        self.fault = "" if response.status_code < 300 else fault
        if place:
            self.fault += f" to {place}: set the address that takes spans, redirects are not followed"
        return response


class SpanExport:
    """Takes finished spans from the loop and exports them.

    Args:
        url: of the collector, with its path.
        version: of toolbus.
        instance: names this run of the bus.
        collect_seconds: how long a span waits for others.
    """

    def __init__(self, url: str, version: str, instance: str, *, collect_seconds: float) -> None:
        self._shown = mask(url)
        self._collect_seconds = collect_seconds
        self._waiting: deque[SpanRow] = deque()
        self._has_work = threading.Event()  # whether the thread has something to do
        self._stopping = threading.Event()
        self._given_up = False  # whether the bus no longer waits for the thread
        self._failures = 0  # requests in a row
        self._why = ""  # the last error of the exporter
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over these.
        resource = Resource.create()
        if str(resource.attributes.get(span_names.SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({span_names.SERVICE_NAME: "toolbus"}))
        own = {span_names.SERVICE_VERSION: version, span_names.SERVICE_INSTANCE: instance}
        self._make = SpanMaker(Resource(own).merge(resource), version)
        self._session = _Session()
        session = None if any(map(os.environ.get, _SESSION_MAKERS)) else self._session
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS, session=session)
        self._thread = threading.Thread(target=self._run, name="toolbus-traces", daemon=True)
        self._overflowed = 0  # spans that found the queue full; the loop's
        self._lost = 0  # spans that could not be sent; the thread's
        self._in_hand = 0  # spans of the request that runs
        self.exported = 0  # spans

    def __repr__(self) -> str:
        return f"<SpanExport waiting={len(self._waiting)} exported={self.exported} dropped={self.dropped}>"

    @property
    def waiting(self) -> int:
        """How many spans are in the queue."""
        return len(self._waiting)

    @property
    def dropped(self) -> int:
        """How many spans were not exported."""
        unsent = self._in_hand + len(self._waiting) if self._given_up else 0
        return self._overflowed + self._lost + unsent

    def start(self) -> None:
        logging.getLogger(_OTEL_LOG).addFilter(self._capture)
        self._thread.start()

    def take(self, span: SpanRow) -> None:
        """Takes a span; on the bus's loop."""
        if len(self._waiting) >= MAX_WAITING:
            self._overflowed += 1
            return
        self._waiting.append(span)
        if not self._has_work.is_set():
            self._has_work.set()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Exports the queued spans, for so many seconds at most, and ends the thread; blocks."""
        self._stopping.set()
        self._has_work.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._given_up = True
            log.warning("%d spans or more were not exported when the bus stopped", len(self._waiting))
        self._exporter.shutdown()

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _capture(self, record: logging.LogRecord) -> bool:
        """Stores the exporter's log line about an attempt on this thread; the bus logs one line for many."""
        if record.thread != self._thread.ident:
            return True
        self._why = record.getMessage()
        return False

    def _run(self) -> None:
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))  # an export must not be traced itself
        try:
            while not self._stopping.is_set():
                self._has_work.wait()
                self._stopping.wait(self._collect_seconds)
                self._has_work.clear()  # before the queue is read, since `take` sets it after it has written
                self._export_waiting()
            self._export_waiting()
        finally:  # here: a later thread may get the id of this one
            logging.getLogger(_OTEL_LOG).removeFilter(self._capture)

    def _export_waiting(self) -> None:
        while self._waiting and not self._given_up:
            batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
            self._in_hand = len(batch)
            sent = self._export(batch)
            self._in_hand = 0
            if not sent:
                self._lost += len(batch)
                pause = min(LONGEST_PAUSE, 2.0 ** min(self._failures, 6) / 2)
                if self._stopping.wait(pause):  # the bus stops: the rest is lost
                    self._lost += len(self._waiting)
                    self._waiting.clear()

    def _export(self, batch: Sequence[SpanRow]) -> bool:
        try:
            epoch = time.time() - time.monotonic()
            result = self._exporter.export([self._make(Span.of(row), epoch) for row in batch])
            self._why = self._session.fault or self._why
            succeeded = result is SpanExportResult.SUCCESS and not self._session.fault
        except Exception as fault:
            succeeded, self._why = False, f"{type(fault).__name__}: {fault}"
        if succeeded:
            if self._failures:
                log.info("spans are exported to %s again; %d were lost", self._shown, self.dropped)
            self._failures = 0
            self.exported += len(batch)
        else:
            if not self._failures and not self._given_up:
                why = shorten(clean_line(mask(self._why)), MAX_WHY)
                log.warning("spans are lost, since %s does not take them: %s", self._shown, why)
            self._failures += 1
        return succeeded


class SpanMaker:
    """Makes the spans of OpenTelemetry's SDK from the bus's."""

    def __init__(self, resource: Resource, version: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope(span_names.SCOPE, version)

    def __call__(self, span: Span, epoch: float) -> ReadableSpan:
        """Returns a span.

        Args:
            epoch: added to times of the bus's clock, makes them seconds since the epoch.
        """
        trace_id = int(span.trace_id, 16)
        tracestate = TraceState.from_header([span.tracestate] if is_tracestate(span.tracestate) else [])

        def at(seconds: float) -> int:
            return int((epoch + seconds) * 1e9)

        def context(span_id: str, *, is_remote: bool) -> SpanContext:
            return SpanContext(trace_id, int(span_id, 16), is_remote, _SAMPLED, tracestate)

        attributes = span_names.call_attributes(
            span.name, span.call_id, id=span.id, source=span.source, mcp=span.mcp
        ) | {span_names.CALLER: span.caller}
        if span.session:
            attributes[span_names.SESSION] = span.session
        status = Status(StatusCode.UNSET)
        if span.error is not None:
            attributes |= span_names.failure_attributes(span.error)
            status = Status(StatusCode.ERROR)
        moments = ((span_names.EVENT_SENT, span.sent), (span_names.EVENT_FIRST_SIGN, span.first_sign))
        return ReadableSpan(
            span_names.dispatch_name(span.name, mcp=span.mcp),
            context(span.span_id, is_remote=False),
            context(span.parent_id, is_remote=True) if span.parent_id else None,
            self._resource,
            attributes,
            [Event(name, timestamp=at(moment)) for name, moment in moments if moment],
            kind=SpanKind.CLIENT if span.mcp else SpanKind.INTERNAL,
            status=status,
            start_time=at(span.started),
            end_time=at(span.ended),
            instrumentation_scope=self._scope,
        )
