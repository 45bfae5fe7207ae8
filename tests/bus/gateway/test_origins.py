"""A plugin that nobody can connect to: its tools go offline together, and come back by themselves (REST-43)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.bus.gateway.calling import client
from tests.bus.gateway.misbehaving import Misbehaving, offer
from tests.support.waiting import WAIT_SECONDS, Stopwatch, until
from toolbus.bus import Bus
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import CallError
from toolbus.sdk import Host
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire

AWAY = (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(grace_seconds=0) as bus:
        yield bus


@pytest.fixture
async def plugin() -> AsyncIterator[Misbehaving]:
    """A plugin that is away; its port refuses connections."""
    async with Misbehaving(there=False) as plugin:
        yield plugin


async def fails(bus: Bus, name: str = "good", **options: Any) -> CallError:
    result = await asyncio.wait_for(bus.call(name, **options), WAIT_SECONDS)
    assert result.is_error
    assert result.error is not None
    return result.error


async def miss(bus: Bus, times: int, name: str = "good") -> None:
    """Makes calls that find nobody, one after the other."""
    for _ in range(times):
        error = await fails(bus, name)
        assert (error.code, error.stage, error.retry_safe) == AWAY
        assert "accepts no connection" in error.message
        assert "refused" in error.message.lower()


def names(bus: Bus, **options: Any) -> list[str]:
    return [each.tool.name for each in bus.list(**options)]


async def test_the_third_refused_connection_in_a_row_takes_all_tools_of_the_source_there_offline(
    bus: Bus, plugin: Misbehaving
) -> None:
    async with Misbehaving() as elsewhere:
        await offer(bus, {"first": elsewhere.url()})
        await offer(bus, {"good": plugin.url(), "text": plugin.url("text")})
        await offer(bus, {"others": plugin.url("list")}, source="plugin:other")
        await offer(bus, {"here": elsewhere.url("number"), "by-name": plugin.url("list", host="localhost")})
        await miss(bus, 1)
        await miss(bus, 1, "text")
        assert names(bus) == ["first", "good", "text", "others", "here", "by-name"]
        await miss(bus, 1)
        assert names(bus) == ["first", "others", "here", "by-name"]
        assert names(bus, include_offline=True) == ["first", "good", "text", "others", "here", "by-name"]
        assert (await asyncio.wait_for(bus.call("here"), WAIT_SECONDS)).unwrap() == -500.0


async def test_a_tool_that_is_offline_is_left_out_and_shown_with_its_state_to_those_who_ask(
    plugin: Misbehaving,
) -> None:
    async with running_bus(grace_seconds=0, http="127.0.0.1:0") as bus, client(bus) as http:
        body = {"name": "good", "callback_url": plugin.url(), "source": "plugin:old"}
        await http.post("/api/tools/register", json=body)
        assert [each["name"] for each in (await http.get("/api/tools")).json()["tools_by_role"]["default"]] == ["good"]
        await miss(bus, 3)
        assert (await http.get("/api/tools")).json()["tools_by_role"] == {"default": []}
        async with Host(bus.grpc_addresses[0]) as host:
            assert not list(await host.list())
            (listed,) = await host.list(include_offline=True)
        assert (listed.name, listed.state) == ("good", "offline")
        assert f"http://127.0.0.1:{plugin.port} accepts no connection" in listed.last_error
        assert "refused" in listed.last_error.lower()


async def test_calls_of_a_tool_that_is_offline_are_answered_at_once(bus: Bus, plugin: Misbehaving) -> None:
    await offer(bus, {"good": plugin.url()})
    await miss(bus, 3)
    stopwatch = Stopwatch()
    for _ in range(100):
        error = await fails(bus)
        assert (error.code, error.stage, error.retry_safe) == AWAY
        assert "'good' is offline" in error.message
        assert "may reconnect" in error.message
    assert stopwatch.seconds() < 0.5


async def test_its_tools_come_back_to_their_places_soon_after_their_plugin_without_having_been_run(
    bus: Bus, plugin: Misbehaving
) -> None:
    async with Misbehaving() as elsewhere:
        await offer(bus, {"before": elsewhere.url()})
        await offer(bus, {"good": plugin.url(), "text": plugin.url("text")})
        await offer(bus, {"after": elsewhere.url()})
        await miss(bus, 3)
        assert names(bus) == ["before", "after"]
        stopwatch = Stopwatch()
        await plugin.come()
        await until(lambda: len(bus.list()) == 4, "the tools to be back", seconds=1.0)
        assert stopwatch.seconds() < 1.0
        assert names(bus) == ["before", "good", "text", "after"]
        assert plugin.requests == []
        assert plugin.connections == 1
        assert bus.list()[1].entry.handlers()[0].session_state == wire.SESSION_STATE_LIVE
        assert (await bus.call("good", {"n": 1})).unwrap() == {"n": 1}
        assert len(plugin.requests) == 1


async def test_an_answer_over_an_open_connection_brings_them_back_at_once(bus: Bus) -> None:
    """Only the listening socket is gone; a call that was on its way is answered."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await go_on.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n42")
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    await offer(bus, {"good": f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"})
    slow = asyncio.ensure_future(bus.call("good"))
    await asyncio.wait_for(asked.wait(), WAIT_SECONDS)
    listening.close()
    await miss(bus, 3)
    assert names(bus) == []
    go_on.set()
    assert (await asyncio.wait_for(slow, WAIT_SECONDS)).unwrap() == 42
    assert names(bus) == ["good"]


async def test_an_origin_is_not_probed_once_its_tools_are_online_or_gone(bus: Bus, plugin: Misbehaving) -> None:
    await offer(bus, {"good": plugin.url()})
    await miss(bus, 3)
    handler: Any = bus.list(include_offline=True)[0].entry.handlers()[0]
    probing = handler.origin.probing
    bus.registry.clear("plugin:old")
    await offer(bus, {"text": plugin.url("text")}, source="plugin:other")  # any change has the bus look
    await until(probing.done, "the probe to end")
    await plugin.come()
    assert (await bus.call("text")).unwrap() == "sunny"
    assert plugin.connections == 1


async def test_a_tool_that_is_registered_again_is_back_at_once_and_so_are_its_neighbours(
    bus: Bus, plugin: Misbehaving
) -> None:
    await offer(bus, {"text": plugin.url("text"), "good": plugin.url(), "other": plugin.url()})
    await miss(bus, 3)
    assert names(bus) == []
    await offer(bus, {"good": plugin.url()})  # whoever registers is there, whatever a probe says
    assert names(bus) == ["text", "good", "other"]
    await miss(bus, 2)
    assert names(bus) == ["text", "good", "other"]
    await miss(bus, 1)
    assert names(bus) == []


@pytest.mark.parametrize("behaviour", ["good", "500", "garbage"])
async def test_any_response_resets_the_count(bus: Bus, plugin: Misbehaving, behaviour: str) -> None:
    name = "500-long" if behaviour == "500" else behaviour
    await offer(bus, {"good": plugin.url(), "says": plugin.url(name)})
    for _ in range(2):
        await miss(bus, 2)
        await plugin.come()
        await asyncio.wait_for(bus.call("says"), WAIT_SECONDS)
        plugin.leave()
        await until(lambda: plugin.opened == 0, "the connection to end")
    assert names(bus) == ["good", "says"]
    await miss(bus, 3)
    assert names(bus) == []


async def test_timeouts_and_errors_never_count(bus: Bus, plugin: Misbehaving) -> None:
    await plugin.come()
    await offer(bus, {"good": plugin.url(), "silent": plugin.url("silent"), "404": plugin.url("404-empty")})
    await asyncio.gather(*(fails(bus, "silent", timeout=0.05) for _ in range(5)))
    for name in ("404", "404", "404"):
        await fails(bus, name)
    plugin.leave()
    await until(lambda: plugin.opened == 0, "the connections to end")
    await miss(bus, 2)
    await plugin.come()
    await fails(bus, "silent", timeout=0.05)  # nor does it begin anew: nobody has answered
    plugin.leave()
    await until(lambda: plugin.opened == 0, "the connection to end")
    assert names(bus) == ["good", "silent", "404"]
    await miss(bus, 1)
    assert names(bus) == []


async def test_connections_that_break_after_they_were_accepted_never_count(bus: Bus, plugin: Misbehaving) -> None:
    await plugin.come()
    await offer(bus, {"reset": plugin.url("reset")})
    for _ in range(5):
        assert (await fails(bus, "reset")).stage is Stage.DISPATCHED
    assert names(bus) == ["reset"]


async def test_many_calls_that_fail_at_once_take_it_offline_once(bus: Bus, plugin: Misbehaving) -> None:
    await offer(bus, {"good": plugin.url()})
    before = bus.registry.revision
    errors = await asyncio.gather(*(fails(bus) for _ in range(50)))
    assert {(error.code, error.stage, error.retry_safe) for error in errors} == {AWAY}
    assert bus.registry.revision == before + 1
    await plugin.come()
    await until(bus.list, "the tool to be back")
    assert plugin.connections == 1
