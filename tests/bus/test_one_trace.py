"""One trace through a host, the bus, two plugins and a callback, as a collector sees it; and the edges of the bus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tests.bus.gateway.calling import client
from tests.parts.audit.chains import entries
from tests.support.collector import Collector, Received, collector
from tests.support.waiting import until
from toolbus import Host, Plugin
from toolbus.functions.scope import ToolScope
from toolbus.parts.audit.audit_log import FOLDER
from toolbus.protocol.limits import Timings
from toolbus.protocol.traceparent import read_traceparent
from toolbus.testing import running_bus

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
QUICK = Timings(span_seconds=0.01)


class CallbackPlugin:
    """A plugin over HTTP that keeps the headers of its calls, and makes a span of each if it has a tracer."""

    def __init__(self, tracer: Any = None) -> None:
        self.url = ""
        self.headers: list[dict[str, str]] = []
        self._tracer = tracer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head)}
                await reader.readexactly(int(headers["content-length"]))
                self.headers.append(headers)
                if self._tracer is not None:
                    came = TraceContextTextMapPropagator().extract(headers)
                    self._tracer.start_span("POST /run", came, kind=api.SpanKind.SERVER).end()
                body = b'{"output": "found"}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def callback_plugin(tracer: Any = None) -> AsyncIterator[CallbackPlugin]:
    plugin = CallbackPlugin(tracer)
    server = await asyncio.start_server(plugin.serve, "127.0.0.1", 0)
    plugin.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/run"
    try:
        yield plugin
    finally:
        server.close()


async def register(http: httpx.AsyncClient, name: str, url: str) -> None:
    body = {"name": name, "description": "d", "callback_url": url, "source": "legacy"}
    assert (await http.post("/api/tools/register", json=body)).status_code == 200


def tree(spans: list[Received]) -> list[str]:
    """Returns the names on the way from the root to the leaf; the spans must be one chain."""
    (root,) = [span for span in spans if not span.parent_id]
    names = [root.name]
    while children := [span for span in spans if span.parent_id == root.span_id]:
        (root,) = children
        names.append(root.name)
    return names


def of_programs(seen: Collector) -> list[Received]:
    """Returns the spans without those that FastAPI makes of requests to the bus, in a program with a provider."""
    return [span for span in seen.spans if span.scope != "fastapi"]


async def test_a_call_through_two_plugins_and_a_callback_is_one_trace_of_seven_spans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with collector() as seen:
        provider = TracerProvider(resource=Resource({"service.name": "programs"}))
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{seen.url}/v1/traces")))
        monkeypatch.setattr(api, "get_tracer_provider", lambda: provider)  # the global one can be set once only
        settings: dict[str, Any] = {"http": "127.0.0.1:0", "data_dir": tmp_path, "audit_calls": True}
        async with (
            running_bus(traces=seen.url, timings=QUICK, **settings) as bus,
            client(bus) as http,
            callback_plugin(provider.get_tracer("legacy")) as legacy,
            Plugin("first", address=bus.grpc_addresses[0]) as first,
            Plugin("second", address=bus.grpc_addresses[0]) as second,
            Host(bus.grpc_addresses[0]) as host,
        ):

            @first.tool
            async def outer(count: int, ctx: ToolScope) -> str:
                return str((await ctx.call("inner")).output)

            @second.tool
            def inner(ctx: ToolScope) -> str:
                return str(ctx.call_sync("deepest").output)

            await register(http, "deepest", legacy.url)
            await asyncio.gather(first.ready(), second.ready())
            assert (await host.call("outer", {"count": "5"})).output == "found"  # repaired, which is logged
            await until(lambda: len(of_programs(seen)) >= 7)
    spans = of_programs(seen)
    assert {span.trace_id for span in spans} == {spans[0].trace_id}
    assert tree(spans) == [
        *("execute_tool outer", "dispatch outer", "execute_tool outer"),
        *("dispatch inner", "execute_tool inner"),
        *("dispatch deepest", "POST /run"),
    ]
    assert {span.service for span in spans if span.name.startswith("dispatch")} == {"toolbus"}
    assert [span.kind for span in spans if span.name == "execute_tool outer"] == [2, 3]  # server, then client
    (bus_span,) = [span for span in spans if span.name == "dispatch outer"]
    call_id = bus_span.attributes["gen_ai.tool.call.id"]
    (line,) = [record for record in caplog.records if "repaired" in record.getMessage()]
    assert vars(line)["call_id"] == call_id
    audited = [call[0] for each in entries(tmp_path / FOLDER) for call in each.get("calls", ())]
    assert call_id in audited
    (record,) = [record for record in bus.records if record.name == "outer"]
    assert (record.call_id, record.trace_id, record.id) == (
        *(call_id, bus_span.trace_id, bus_span.attributes["toolbus.id"]),
    )


# -- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_the_headers_of_an_invoke_go_on_to_the_callback(accept: str) -> None:
    async with running_bus(http="127.0.0.1:0") as bus, client(bus) as http, callback_plugin() as legacy:
        await register(http, "t", legacy.url)
        for headers in (
            {"traceparent": UNSAMPLED, "tracestate": "a=1"},
            {"traceparent": "nonsense", "tracestate": "a=1"},
            {},
        ):
            body = {"name": "t", "arguments": {}}
            assert (await http.post("/api/tools/invoke", json=body, headers={"accept": accept, **headers})).is_success
    told = [(each.get("traceparent"), each.get("tracestate")) for each in legacy.headers]
    assert told == [(UNSAMPLED, "a=1"), (None, None), (None, None)]


async def test_a_sampled_invoke_reaches_its_callback_as_a_child_of_the_buss_span() -> None:
    with collector() as seen:
        async with (
            running_bus(traces=seen.url, http="127.0.0.1:0") as bus,
            client(bus) as http,
            callback_plugin() as legacy,
        ):
            await register(http, "t", legacy.url)
            body = {"name": "t", "call_id": "mine", "context": {"traceparent": UNSAMPLED}}  # the header wins
            await http.post("/api/tools/invoke", json=body, headers={"traceparent": SAMPLED})
        (span,) = seen.spans
        came = read_traceparent(legacy.headers[0]["traceparent"])
        assert came is not None
        assert (came.trace_id, came.span_id, came.sampled) == (TRACE, span.span_id, True)
        assert (span.parent_id, span.attributes["gen_ai.tool.call.id"], span.events) == (SPAN, "mine", ["sent"])
