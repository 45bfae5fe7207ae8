"""A bus that thousands of peers reach at once, and one whose gRPC server other libraries have put interceptors into."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.instrumentation.grpc import GrpcAioInstrumentorServer
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.waiting import WAIT_SECONDS, until
from toolbus.protocol.tool import Limits
from toolbus.sdk import Host, Plugin
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1.tool_bus_service_pb2_grpc import ToolBusServiceStub

CROWD = 3_000

# -- crowds ----------------------------------------------------------------------------------------------------------


async def test_thousands_of_requests_at_once_are_all_answered() -> None:
    async with running_bus() as bus, grpc.aio.insecure_channel(bus.grpc_addresses[0]) as channel:
        stub = ToolBusServiceStub(channel)

        async def status() -> str:
            try:
                await stub.List(wire.ListRequest())
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        # The bus runs on this loop too, so it reads none of them before all are sent.
        assert Counter(await asyncio.gather(*(status() for _ in range(CROWD)))) == {"OK": CROWD}


@pytest.mark.parametrize("sessions", [CROWD, 100])
async def test_streams_that_come_at_once_attach_or_are_told_which_limit_refuses_them(sessions: int) -> None:
    crowd = CROWD // 2  # more than grpcio lets wait by default
    async with (
        running_bus(limits=Limits(sessions=sessions)) as bus,
        grpc.aio.insecure_channel(bus.grpc_addresses[0]) as channel,
    ):
        stub: Any = ToolBusServiceStub(channel)
        calls: list[Any] = []

        async def outcome(number: int) -> str:
            call = stub.Invoke()
            calls.append(call)
            try:
                attach = wire.Attach(source=f"s{number}", protocol_version=1)
                await call.write(wire.InvokeRequest(attach=attach))
                if await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the published stubs lag behind
                    return "attached"
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            return str((await call.code()).name)

        outcomes = Counter(await asyncio.gather(*map(outcome, range(crowd))))
        assert outcomes["attached"] == min(sessions, crowd)
        assert outcomes["RESOURCE_EXHAUSTED"] == crowd - outcomes["attached"]
        for call in calls:
            call.cancel()


# -- interceptors of others -------------------------------------------------------------------------------------------


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Instruments every gRPC server that starts during a test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = GrpcAioInstrumentorServer()
    instrumentor.instrument(tracer_provider=provider)
    try:
        yield exporter
    finally:
        instrumentor.uninstrument()


async def test_peers_attach_call_and_watch_on_a_bus_that_is_instrumented(spans: InMemorySpanExporter) -> None:
    async with running_bus(lane=False) as bus:
        [address] = bus.grpc_addresses
        plugin = Plugin("adder", address=address)

        @plugin.tool
        async def add(a: int, b: int) -> int:
            return a + b

        async with plugin, Host(address=address) as host:
            results = await asyncio.gather(*(host.call("add", {"a": number, "b": 1}) for number in range(1_000)))
            assert [json.loads(result.output_json) for result in results] == list(range(1, 1_001))
            async with grpc.aio.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
                watch.cancel()
                listed = await ToolBusServiceStub(channel).List(wire.ListRequest())
                assert [each.tool.name for each in listed.tools] == ["add"]
    await until(lambda: any(each.name.endswith("/Invoke") for each in spans.get_finished_spans()), "a span")


@pytest.mark.usefixtures("spans")
async def test_a_refusal_keeps_its_status_on_a_bus_that_is_instrumented() -> None:
    async with running_bus() as bus, grpc.aio.insecure_channel(bus.grpc_addresses[0]) as channel:
        stub: Any = ToolBusServiceStub(channel)
        for first, status in (
            (wire.InvokeRequest(attach=wire.Attach(source="s", protocol_version=9)), "FAILED_PRECONDITION"),
            (wire.InvokeRequest(heartbeat=wire.Heartbeat(sequence=1)), "INVALID_ARGUMENT"),
        ):
            call = stub.Invoke()
            await call.write(first)
            await call.done_writing()
            assert (await call.code()).name == status
        plain: Any = channel
        raw = plain.stream_stream("/toolbus.v1.ToolBusService/Invoke")(iter([b"\xff\xff"]))
        assert (await raw.code()).name == "INVALID_ARGUMENT"


async def test_a_bus_that_the_instrument_command_starts_serves_its_peers() -> None:
    environment = os.environ | {
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
    }
    instrument = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
    command = ("-c", instrument, sys.executable, "-m", "toolbus.cli", "serve", "--ephemeral")
    bus = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--grpc", "127.0.0.1:0", "--http", "off", "--json",
        env=environment, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert bus.stdout is not None
        ready = json.loads(await asyncio.wait_for(bus.stdout.readline(), WAIT_SECONDS))
        async with Host(address=ready["grpc"][0]) as host:
            assert len(await host.list()) == 0
    finally:
        bus.send_signal(signal.SIGTERM)
        await asyncio.wait_for(bus.communicate(), WAIT_SECONDS)
    assert bus.returncode == 0
