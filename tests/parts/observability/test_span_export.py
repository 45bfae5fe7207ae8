"""Tests of the thread that exports spans: against a collector that is fast, slow, refusing or gone."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.collector import collector
from tests.support.waiting import until
from toolbus.bus.calls.call import SpanRow, Trace
from toolbus.errors import Code, Stage
from toolbus.parts.observability.span_export import MAX_WAITING, SpanExport
from toolbus.protocol.tool import CallError
from toolbus.protocol.traceparent import TraceContext

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def span(
    number: int = 1,
    *,
    parent_id: str = PARENT,
    mcp: bool = False,
    first_sign: float = 0.0,
    error: CallError | None = None,
) -> SpanRow:
    trace = Trace()
    trace.traceparent = TraceContext.of(TRACE, f"{number:016x}", sampled=True).text
    trace.parent_id, trace.tracestate, trace.trace_id = parent_id, "a=1", TRACE
    trace.recorded, trace.sent, trace.first_sign = True, 100.25, first_sign
    row = (f"c{number}", "far:t", "far", "host", 100.0, 101.5, 0, 2, 1, None, str(number), None)
    return trace, row, "s1", mcp, error


@contextmanager
def exporting(url: str, stop_seconds: float = 60.0) -> Iterator[SpanExport]:
    export = SpanExport(url, "1.2", "boot", collect_seconds=0.01)
    export.start()
    try:
        yield export
    finally:
        export.stop(stop_seconds)


async def test_a_span_arrives_with_its_parent_its_times_and_what_it_may_say() -> None:
    with collector() as seen, exporting(f"{seen.url}/v1/traces") as export:
        export.take(span())
        (received,) = await seen.wait(1)
    assert (received.name, received.trace_id, received.span_id, received.parent_id) == (
        *("dispatch far:t", TRACE, f"{1:016x}", PARENT),
    )
    assert (received.ended - received.started, received.kind, received.failed) == (1_500_000_000, 1, False)
    assert (received.events, received.tracestate, received.service) == (["sent"], "a=1", "toolbus")
    assert received.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "far:t",
        "gen_ai.tool.call.id": "c1",
        "gen_ai.tool.type": "function",
        "rpc.system.name": "grpc",
        "rpc.method": "toolbus.v1.ToolBusService/Invoke",
        "toolbus.source": "far",
        "toolbus.id": "1",
        "toolbus.caller": "host",
        "toolbus.protocol.session": "s1",
    }
    assert seen.paths == ["/v1/traces"]


async def test_the_span_of_a_failure_has_code_stage_and_retry_but_not_its_text() -> None:
    error = CallError(Code.TOOL, "the password is hunter2", Stage.ACCEPTED, retry_safe=False)
    with collector() as seen, exporting(seen.url) as export:
        export.take(span(error=error, mcp=True, parent_id="", first_sign=100.5))
        (received,) = await seen.wait(1)
    assert (received.failed, received.name, received.kind, received.parent_id) == (True, "tools/call far:t", 3, "")
    assert (received.attributes["error.type"], received.attributes["toolbus.stage"]) == ("TOOL", "accepted")
    assert received.attributes["toolbus.retry_safe"] is False
    assert received.events == ["sent", "first_sign"]
    assert b"hunter2" not in b"".join(seen.raw)


async def test_many_spans_go_out_in_few_requests() -> None:
    with collector() as seen, exporting(seen.url) as export:
        for number in range(1, 1_001):
            export.take(span(number))
        await seen.wait(1_000)
        assert len(seen.raw) <= 5
        assert (export.dropped, len({each.span_id for each in seen.spans})) == (0, 1_000)


async def test_what_waits_at_the_end_is_exported() -> None:
    with collector() as seen:
        with exporting(seen.url) as export:
            export.take(span())
        assert len(seen.spans) == 1


async def test_a_collector_that_stands_still_costs_the_bus_only_spans() -> None:
    with collector() as seen, exporting(seen.url, stop_seconds=0.0) as export:
        seen.held.clear()
        export.take(span())
        for number in range(MAX_WAITING + 60_000):
            export.take(span(number + 1))  # never waits
        assert export.dropped >= 60_000 - 2 * 512  # what the thread has taken meanwhile made room
        assert export.waiting <= MAX_WAITING
        seen.held.set()


async def test_the_loss_of_a_collector_is_logged_once_and_its_return_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with collector() as seen, exporting(seen.url) as export:
        seen.status = 400
        export.take(span())
        await until(lambda: export.dropped == 1)
        seen.status = 200
        export.take(span(2))
        await seen.wait(1)
        await until(lambda: "again" in caplog.text)
    lines = [record for record in caplog.records if record.name.startswith(("toolbus", "opentelemetry"))]
    first, second = (record.getMessage() for record in lines)
    assert first.startswith(f"spans are lost, since {seen.url} does not take them: ")
    assert "400" in first
    assert second == f"spans are exported to {seen.url} again; 1 were lost"


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308, 400, 404, 429, 503])
async def test_spans_that_a_collector_does_not_take_are_dropped_and_the_log_names_its_status(
    caplog: pytest.LogCaptureFixture, status: int
) -> None:
    with collector() as elsewhere, collector() as seen, exporting(seen.url) as export:
        seen.status = status
        seen.location = f"{elsewhere.url}/v1/traces" if status < 400 else ""
        export.take(span())
        await until(lambda: export.dropped == 1)
        assert (export.exported, elsewhere.paths) == (0, [])
        [line] = [each.getMessage() for each in caplog.records if each.name.startswith(("toolbus", "opentelemetry"))]
        assert f"HTTP {status}" in line
        assert seen.location in line
        seen.status, seen.location = 200, ""
        export.take(span(2))
        await seen.wait(1)


async def test_a_port_where_nobody_listens_is_named_as_such(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # it does not listen
        with exporting(f"http://user:hunter2@127.0.0.1:{bound.getsockname()[1]}") as export:
            export.take(span())
            await until(lambda: export.dropped == 1)
    assert ConnectionRefusedError.__name__ in caplog.text
    assert "hunter2" not in caplog.text


async def test_a_bus_that_stops_does_not_wait_for_a_collector_that_stands_still(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with collector() as seen:
        seen.held.clear()
        with exporting(seen.url, stop_seconds=0.01) as export:
            export.take(span())
            await until(lambda: not export.waiting)
            export.take(span(2))
        assert "1 spans or more were not exported" in caplog.text
        assert export.dropped == 2  # that of the request that runs too
        seen.held.set()


async def test_variables_of_opentelemetry_name_the_service_and_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "tools-of-mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    with collector() as seen, exporting(seen.url) as export:
        export.take(span())
        (received,) = await seen.wait(1)
    assert received.service == "tools-of-mine"
    assert seen.headers[0]["authorization"] == "Bearer x"


async def test_a_password_in_the_address_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with collector() as seen, exporting(seen.url.replace("//", "//me:hunter2@")) as export:
        seen.status = 403
        export.take(span())
        await until(lambda: export.dropped == 1)
    assert "does not take them" in caplog.text
    assert "hunter2" not in caplog.text


def test_the_export_describes_itself() -> None:
    export = SpanExport("http://127.0.0.1:1", "1", "b", collect_seconds=1.0)
    assert repr(export) == "<SpanExport waiting=0 exported=0 dropped=0>"
