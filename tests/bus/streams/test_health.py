"""grpc.health.v1 and the HTTP probes of a running bus, on every rung of the ladder."""

# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name
from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.faults.conftest import Connect, address, connect, grace_seconds, limits, timings
from tests.faults.raw_peer import RawPeer, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus, Config
from toolbus.protocol.limits import Timings
from toolbus.v1 import tool_bus_service_pb2 as wire

Status = health_pb2.HealthCheckResponse
SERVICE = "toolbus.v1.ToolBusService"


@pytest.fixture
async def bus(grace_seconds: float, timings: Timings) -> AsyncIterator[Bus]:
    config = Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0", grace_seconds=grace_seconds)
    async with Bus(config, timings=timings) as bus:
        yield bus


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def health(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


class Watch:
    """The statuses that one Watch has sent so far."""

    def __init__(self, health: Any, service: str) -> None:
        self.history: list[int] = []
        self._stream = health.Watch(health_pb2.HealthCheckRequest(service=service))
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for answer in self._stream:
            self.history.append(answer.status)

    async def says(self, *statuses: int) -> None:
        await until(lambda: self.history == list(statuses) or len(self.history) > len(statuses), f"{statuses}")
        assert self.history == list(statuses)

    async def end(self) -> None:
        self._stream.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


async def _check(health: Any, service: str) -> int:
    try:
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND  # noqa: PT017
        return int(Status.SERVICE_UNKNOWN)
    return int(answer.status)


async def test_the_bus_and_its_service_are_serving(health: Any) -> None:
    assert [await _check(health, service) for service in ("", SERVICE)] == [Status.SERVING] * 2


async def test_an_unknown_service_is_not_found_and_the_error_names_the_known_ones(health: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await health.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND
    assert "toolbus.source." in (failure.value.details() or "")


async def test_a_source_goes_from_unknown_to_serving_to_not_serving_to_unknown(health: Any, connect: Connect) -> None:
    watch = Watch(health, "toolbus.source.plugin")
    await watch.says(Status.SERVICE_UNKNOWN)
    plugin = await connect("plugin", tool("t"))
    await watch.says(Status.SERVICE_UNKNOWN, Status.SERVING)
    assert await _check(health, "toolbus.source.plugin") == Status.SERVING
    await plugin.close()
    await watch.says(Status.SERVICE_UNKNOWN, Status.SERVING, Status.NOT_SERVING)
    assert await _check(health, "toolbus.source.plugin") == Status.NOT_SERVING
    await watch.says(Status.SERVICE_UNKNOWN, Status.SERVING, Status.NOT_SERVING, Status.SERVICE_UNKNOWN)
    assert await _check(health, "toolbus.source.plugin") == Status.SERVICE_UNKNOWN
    await watch.end()


@pytest.mark.parametrize("grace_seconds", [30.0])
async def test_a_source_that_reconnects_within_its_grace_period_is_serving_again(
    health: Any, connect: Connect, grace_seconds: float
) -> None:
    watch = Watch(health, "toolbus.source.plugin")
    await watch.says(Status.SERVICE_UNKNOWN)
    plugin = await connect("plugin", tool("t"))
    await watch.says(Status.SERVICE_UNKNOWN, Status.SERVING)
    await plugin.close()
    await watch.says(Status.SERVICE_UNKNOWN, Status.SERVING, Status.NOT_SERVING)
    await connect("plugin", tool("t"))
    await watch.says(Status.SERVICE_UNKNOWN, Status.SERVING, Status.NOT_SERVING, Status.SERVING)
    await watch.end()


async def test_a_source_that_drained_is_unknown_at_once(health: Any, connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    watch = Watch(health, "toolbus.source.plugin")
    await watch.says(Status.SERVING)
    await plugin.send(drain=wire.Drain())
    await watch.says(Status.SERVING, Status.SERVICE_UNKNOWN)
    await watch.end()


async def test_a_half_closed_source_is_not_serving_while_its_own_call_still_runs(health: Any, connect: Connect) -> None:
    await connect("other", tool("slow"))
    plugin = await connect("plugin", tool("t"))
    watch = Watch(health, "toolbus.source.plugin")
    await watch.says(Status.SERVING)
    await plugin.start(plugin.ask("slow"))
    await plugin.half_close()
    await watch.says(Status.SERVING, Status.NOT_SERVING)
    await watch.end()


@pytest.mark.parametrize(
    "timings", [Timings(tick_seconds=0.02, busy_heartbeat_seconds=0.3, idle_heartbeat_seconds=0.3)]
)
async def test_a_source_that_answers_no_heartbeats_is_not_serving_until_it_answers_again(
    health: Any, connect: Connect
) -> None:
    plugin = await connect("plugin", tool("t"), echoes=False)
    watch = Watch(health, "toolbus.source.plugin")
    await watch.says(Status.SERVING)
    await watch.says(Status.SERVING, Status.NOT_SERVING)
    await plugin.send(heartbeat=wire.Heartbeat())
    await watch.says(Status.SERVING, Status.NOT_SERVING, Status.SERVING)
    await watch.end()


async def test_a_source_is_serving_while_one_of_its_sessions_is(health: Any, connect: Connect) -> None:
    pair = [await connect("pair", tool("t")) for _ in range(2)]
    watch = Watch(health, "toolbus.source.pair")
    await watch.says(Status.SERVING)
    await pair[0].close()
    host = await connect("host")
    await until(lambda: host.attached)
    assert await _check(health, "toolbus.source.pair") == Status.SERVING
    await pair[1].close()
    await watch.says(Status.SERVING, Status.NOT_SERVING, Status.SERVICE_UNKNOWN)
    await watch.end()


async def test_list_names_the_bus_its_service_and_each_source(health: Any, connect: Connect) -> None:
    await connect("one", tool("t"))
    lost = await connect("two", tool("u"))
    await lost.close()

    async def statuses() -> dict[str, int]:
        answer = await health.List(health_pb2.HealthListRequest())
        return {name: status.status for name, status in answer.statuses.items()}

    async with asyncio.timeout(WAIT_SECONDS):
        while (await statuses()).get("toolbus.source.two") != Status.NOT_SERVING:
            pass
    assert await statuses() == {
        "": Status.SERVING,
        SERVICE: Status.SERVING,
        "toolbus.source.one": Status.SERVING,
        "toolbus.source.two": Status.NOT_SERVING,
    }


async def _get(address: str, path: str) -> int:
    def get() -> int:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=WAIT_SECONDS) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    return await asyncio.to_thread(get)


async def test_a_draining_bus_is_alive_but_not_ready(bus: Bus, health: Any, connect: Connect) -> None:
    assert bus.http_address is not None
    watches = [Watch(health, service) for service in ("", SERVICE)]
    for watch in watches:
        await watch.says(Status.SERVING)
    plugin: RawPeer = await connect("plugin", tool("t"))
    await plugin.start(plugin.ask("t"))
    await plugin.received()
    assert [await _get(bus.http_address, path) for path in ("/healthz", "/readyz")] == [200, 200]
    draining = asyncio.create_task(bus.drain(grace_seconds=WAIT_SECONDS))
    for watch in watches:
        await watch.says(Status.SERVING, Status.NOT_SERVING)
    assert [await _get(bus.http_address, path) for path in ("/healthz", "/readyz")] == [200, 503]
    assert await _check(health, "") == Status.NOT_SERVING
    await plugin.close()
    await asyncio.wait_for(draining, WAIT_SECONDS)
    for watch in watches:
        await watch.end()
