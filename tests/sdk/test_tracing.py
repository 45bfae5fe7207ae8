"""Tests of the spans of hosts and plugins in a program that uses OpenTelemetry, and of its absence."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from tests.support.waiting import until, within
from toolbus import Host, Plugin, SyncHost
from toolbus.bus import Bus
from toolbus.functions.scope import ToolScope
from toolbus.sdk import CallContext
from toolbus.sdk.tracing import begin_span, begin_tool
from toolbus.testing import running_bus
from toolbus.v1 import tool_pb2 as pb

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


class Program:
    """A program with OpenTelemetry: what it records."""

    def __init__(self, provider: TracerProvider, spans: InMemorySpanExporter) -> None:
        self.tracer = provider.get_tracer("mine")
        self._spans = spans

    async def spans(self, count: int) -> dict[str, ReadableSpan]:
        await until(lambda: len(self.finished) >= count)
        return {span.name: span for span in self.finished}

    @property
    def finished(self) -> Sequence[ReadableSpan]:
        return tuple(self._spans.get_finished_spans())

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.finished]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return _program(monkeypatch)


def _program(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Program:
    spans, provider = InMemorySpanExporter(), TracerProvider(**more)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(api, "get_tracer_provider", lambda: provider)  # the global one can be set once only
    return Program(provider, spans)


def parent(span: ReadableSpan) -> int:
    return int(span.parent.span_id) if span.parent is not None else 0


def id_of(span: ReadableSpan) -> int:
    return int(span.context.span_id)


async def test_the_spans_of_a_host_a_plugin_and_what_runs_inside_it_are_one_trace(program: Program) -> None:
    async with (
        running_bus() as bus,
        Plugin("kitchen", address=bus.grpc_addresses[0]) as plugin,
        Host(bus.grpc_addresses[0]) as host,
    ):

        @plugin.tool
        async def cook(ctx: ToolScope) -> str:
            with program.tracer.start_as_current_span("stir"):
                return str((await ctx.call("heat")).output)

        @plugin.tool
        def heat() -> str:
            with program.tracer.start_as_current_span("burn"):
                return "hot"

        await plugin.ready()
        with program.tracer.start_as_current_span("dinner"):
            assert (await host.call("cook")).output == "hot"
        spans = await program.spans(6)
    outer = spans["dinner"]
    assert {span.context.trace_id for span in spans.values()} == {outer.context.trace_id}
    finished = program.finished
    client, server = (
        next(span for span in finished if span.name == "execute_tool cook" and span.kind is kind)
        for kind in (api.SpanKind.CLIENT, api.SpanKind.SERVER)
    )
    assert (parent(client), parent(server), parent(spans["stir"])) == (id_of(outer), id_of(client), id_of(server))
    assert parent(spans["execute_tool heat"]) == id_of(spans["stir"])
    assert parent(spans["burn"]) == id_of(spans["execute_tool heat"])
    assert client.attributes is not None
    assert server.attributes is not None
    assert client.attributes["gen_ai.tool.name"] == "cook"
    (record,) = [record for record in bus.records if record.name == "cook"]
    assert client.attributes["gen_ai.tool.call.id"] == record.call_id
    assert server.attributes["toolbus.id"] == record.id
    assert record.trace_id == f"{outer.context.trace_id:032x}"


async def _call_and_names(program: Program, bus: Bus, **more: Any) -> tuple[list[str], list[str]]:
    seen: list[str] = []
    async with Plugin("p", address=bus.grpc_addresses[0]) as plugin, Host(bus.grpc_addresses[0]) as host:

        @plugin.tool
        async def look() -> int:
            with program.tracer.start_as_current_span("inside") as span:
                seen.append(f"{span.get_span_context().trace_id:032x}")
            return 1

        await plugin.ready()
        assert (await host.call("look")).output == 1
    return program.names, seen


async def test_what_a_tool_begins_in_a_trace_that_is_not_sampled_is_not_sampled_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = _program(monkeypatch)
    remote = api.NonRecordingSpan(api.SpanContext(int(TRACE, 16), int(SPAN, 16), True, api.TraceFlags(0)))
    async with running_bus() as bus:
        with api.use_span(remote):
            names, traces = await _call_and_names(program, bus)
    assert (names, traces) == ([], [TRACE])


async def test_a_program_that_samples_nothing_says_so_and_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program(monkeypatch, sampler=ParentBased(ALWAYS_OFF))
    async with running_bus() as bus:
        names, _ = await _call_and_names(program, bus)
        assert [record.trace_id for record in bus.records] == [""]
    assert names == []


async def test_failed_and_cancelled_calls_end_their_spans_with_the_code(program: Program) -> None:
    async with (
        running_bus(grace_seconds=0.0) as bus,
        Plugin("p", address=bus.grpc_addresses[0]) as plugin,
        Host(bus.grpc_addresses[0]) as host,
    ):
        started = asyncio.Event()

        @plugin.tool
        async def hang() -> None:
            started.set()
            await asyncio.Event().wait()

        @plugin.tool
        def fail() -> None:
            raise ValueError("secret words")

        await plugin.ready()
        await host.call("fail")
        await host.call_many([("nowhere", {})])
        call = asyncio.ensure_future(host.call("hang"))
        await within(started.wait())
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await program.spans(5)
    spans = program.finished
    errors = sorted((span.name, span.kind.name, str((span.attributes or {})["error.type"])) for span in spans)
    assert errors == [
        ("execute_tool fail", "CLIENT", "TOOL"),
        ("execute_tool fail", "SERVER", "TOOL"),
        ("execute_tool hang", "CLIENT", "CANCELLED"),
        ("execute_tool hang", "SERVER", "CANCELLED"),
        ("execute_tool nowhere", "CLIENT", "NOT_FOUND"),
    ]
    assert all(span.status.status_code is api.StatusCode.ERROR for span in spans)
    assert "secret words" not in "".join(span.to_json() for span in spans)


async def test_a_blocking_host_and_a_program_around_its_own_bus_trace_their_calls(program: Program) -> None:
    async with running_bus() as bus:

        @bus.tool
        def local() -> int:
            with program.tracer.start_as_current_span("inside"):
                return 1

        assert (await bus.call("local")).output == 1
        spans = await program.spans(3)
        kinds = {span.kind.name for span in program.finished}
        assert kinds == {"CLIENT", "SERVER", "INTERNAL"}
        assert len({span.context.trace_id for span in spans.values()}) == 1

        def blocking() -> Any:
            with SyncHost(bus.grpc_addresses[0]) as host:
                return [host.call("local").output, host.call_many([("local", {})])[0].output]

        assert await asyncio.to_thread(blocking) == [1, 1]
        await program.spans(9)
        assert len(program.names) == 9


class _Faulty(SpanProcessor):  # type: ignore[misc]  # OpenTelemetry has no types here
    """A processor of the program that fails, at the beginning of spans or at their end."""

    def __init__(self, fails: str) -> None:
        self._fails = fails

    def on_start(self, span: object, parent_context: object = None) -> None:
        if self._fails == "on_start":
            raise RuntimeError("no such exporter")

    def on_end(self, span: object) -> None:
        if self._fails == "on_end":
            raise RuntimeError("no such exporter")


@pytest.mark.parametrize("fails", ["on_start", "on_end"])
async def test_a_fault_of_the_programs_own_tracing_fails_no_call(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    provider = TracerProvider()
    provider.add_span_processor(_Faulty(fails))
    monkeypatch.setattr(api, "get_tracer_provider", lambda: provider)
    async with running_bus() as bus, Plugin("kitchen", address=bus.grpc_addresses[0]) as plugin:

        @plugin.tool
        async def cook() -> str:
            return "soup"

        await plugin.ready()
        async with Host(bus.grpc_addresses[0]) as host:
            for context in (CallContext(), CallContext(traceparent=SAMPLED)):
                assert (await within(host.call("cook", context=context))).output == "soup"


def test_without_a_provider_that_records_nothing_is_begun() -> None:
    assert begin_span("t") is None
    assert begin_tool(api, pb.ToolCall(call_id="1", name="t", traceparent=SAMPLED)) is None


def test_a_traceparent_that_breaks_the_standard_begins_no_span(program: Program) -> None:
    for text in ("", "00-1", SAMPLED.upper()):
        assert begin_tool(api, pb.ToolCall(call_id="1", name="t", traceparent=text)) is None


def test_the_sdk_does_not_import_opentelemetry() -> None:
    code = (
        "import sys, toolbus, toolbus.sdk.tracing, toolbus.sdk.host, toolbus.sdk.incoming_calls\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
