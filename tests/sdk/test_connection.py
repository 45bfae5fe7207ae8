from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tests.sdk.connection_cases import add, free_address, plugin_with
from tests.sdk.played_bus import SECONDS, PlayedStream, played_bus
from tests.support.waiting import Stopwatch, until, within
from toolbus.errors import (
    AlreadyAttached,
    InvalidRequest,
    NotPermitted,
    PeerLost,
    RequestError,
    SetupError,
)
from toolbus.sdk.connection import portions
from toolbus.sdk.connection_settings import TIMINGS, ConnectionSettings
from toolbus.sdk.host import Host
from toolbus.sdk.plugin_client import Plugin
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"address": "localhost"}, "HOST:PORT"),
        ({"address": "unix:"}, "unix:PATH"),
        ({"source": "no spaces"}, "source"),
        ({"instance": "x" * 129}, r"\(129 characters\) breaks the rule \[!-~\]\{0,128\}: use at most"),
        ({"instance": "two words"}, "instance 'two words'.*without blanks"),
        ({"instance": "x\nforged"}, r"instance 'x\\nforged'"),
        ({"max_in_flight": 5000}, "4096"),
    ],
)
def test_a_setting_that_breaks_its_rule_is_refused_by_name(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(SetupError, match=word):
        ConnectionSettings(**{"source": "calc", **settings})


def test_the_environment_sets_the_address_of_the_bus_and_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBUS_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("TOOLBUS_TOKEN", "secret")
    settings = ConnectionSettings("calc")
    assert (settings.address, settings.token) == ("127.0.0.1:1", "secret")
    assert "secret" not in repr(settings)


def test_tools_that_do_not_fit_into_one_message_are_cut_into_portions() -> None:
    tools = [pb.Tool(name=f"t{number}", description="d" * (5 << 20)) for number in range(5)]
    assert [len(portion) for portion in portions(tools, TIMINGS.attach_bytes)] == [2, 2, 1]
    assert portions([], 1) == [[]]


# -- attaching --------------------------------------------------------------------------------------------------------


async def test_a_plugin_may_start_before_the_bus() -> None:
    address = free_address()
    async with plugin_with(address, add) as plugin, Host(address) as host:
        call = asyncio.create_task(host.call("add", {"a": 1, "b": 2}, timeout=SECONDS))
        async with running_bus(grpc=(address,)):
            await within(plugin.ready())
            assert (await within(call)).unwrap() == 3


async def test_a_restart_of_the_bus_is_a_pause_and_not_an_error() -> None:
    address = free_address()
    plugins = [plugin_with(address, add, source=f"calc{number}", qualified=True) for number in range(5)]
    async with Host(address) as host:
        async with running_bus(grpc=(address,)):
            for plugin in plugins:
                await plugin.start()
                await within(plugin.ready())
            assert (await within(host.call("calc0:add", {"a": 1, "b": 2}))).unwrap() == 3
        meanwhile = asyncio.create_task(host.call("calc3:add", {"a": 2, "b": 2}))
        async with running_bus(grpc=(address,)):
            stopwatch = Stopwatch()
            assert (await within(meanwhile)).unwrap() == 4
            await within(asyncio.gather(*(plugin.ready() for plugin in plugins)))
            assert stopwatch.seconds() < 1.5  # 0.8 s at most of back-off, on a busy machine
            assert len(await host.list()) == 5
        for plugin in plugins:
            await plugin.close(0)


async def test_a_unix_socket_will_do_as_well() -> None:
    async with running_bus(unix=True) as bus:
        address = bus.grpc_addresses[0]
        async with plugin_with(address, add) as plugin, Host(address) as host:
            await within(plugin.ready())
            assert (await host.call("add", {"a": 1, "b": 2})).unwrap() == 3


async def test_a_replaced_plugin_does_not_come_back() -> None:
    async with running_bus() as bus:
        address = bus.grpc_addresses[0]
        older = plugin_with(address, add, instance="one")
        newer = plugin_with(address, add, instance="one")
        async with older:
            await within(older.ready())
            await newer.start()
            with pytest.raises(PeerLost, match="same source and instance"):
                await within(older.ended())
            with pytest.raises(PeerLost, match="same source and instance"):
                await within(older.ready())
            await within(newer.ready())
        await newer.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.FAILED_PRECONDITION, RequestError),
        (grpc.StatusCode.PERMISSION_DENIED, NotPermitted),
        (grpc.StatusCode.ALREADY_EXISTS, AlreadyAttached),
    ],
)
async def test_a_refused_attach_ends_with_the_sentence_of_the_bus(code: grpc.StatusCode, kind: type[Exception]) -> None:
    async def refuse(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        await stream.end(code, "because of the moon")

    async with played_bus(refuse) as bus, plugin_with(bus.address, add) as plugin:
        with pytest.raises(kind, match="because of the moon"):
            await within(plugin.ready())
        with pytest.raises(kind, match="because of the moon"):
            await within(plugin.ended())
        assert bus.streams == 1


async def test_texts_of_a_bus_stay_within_their_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def drain(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.write(drain=wire.Drain(reason="x\nERROR toolbus: forged"))
        await stream.end(grpc.StatusCode.UNAVAILABLE, "y\nERROR toolbus: forged\x1b[2J")

    async def refuse(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        await stream.end(grpc.StatusCode.PERMISSION_DENIED, "z\nERROR toolbus: forged\x1b[2J")

    with caplog.at_level(logging.INFO, "toolbus"):
        async with played_bus(drain, refuse) as bus, plugin_with(bus.address, add) as plugin:
            with pytest.raises(NotPermitted, match="forged"):
                await within(plugin.ended())
    lines = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert len(lines) >= 3
    assert not [line for line in lines if "\n" in line or "\x1b" in line]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL])
async def test_an_attach_that_may_succeed_later_is_tried_again(code: grpc.StatusCode) -> None:
    seen = []

    async def refuse(stream: PlayedStream) -> None:
        seen.append((await stream.read_until("attach")).attach.instance)
        await stream.end(code, "not now")

    async def accept(stream: PlayedStream) -> None:
        seen.append((await stream.accept()).instance)
        await stream.read()

    async with played_bus(refuse, accept) as bus, plugin_with(bus.address, add) as plugin:
        await within(plugin.ready())
    assert len(seen) == 2
    assert seen[0] == seen[1] != ""


async def test_a_server_at_the_address_that_is_not_a_bus_is_reported() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with plugin_with(address, add) as plugin:
        with pytest.raises(RequestError, match="not a toolbus"):
            await within(plugin.ready())
    await server.stop(0)


async def test_tools_beyond_one_message_follow_by_register() -> None:
    async def accept(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.read()

    async with played_bus(accept) as bus:
        plugin = Plugin("calc", address=bus.address, _timings=replace(TIMINGS, attach_bytes=12_000))
        for number in range(5):
            plugin.add_tool(add, name=f"add{number}", description="d" * 5000)
        async with plugin:
            await within(plugin.ready())
            assert [[tool.name for tool in request.tools] for request in bus.registered] == [["add2", "add3"], ["add4"]]
            assert {request.session_id for request in bus.registered} == {"s"}


async def test_a_drain_for_shutdown_brings_the_peer_back_and_a_requested_one_does_not() -> None:
    drains = []

    def say(reason: str) -> Callable[[PlayedStream], Awaitable[None]]:
        async def play(stream: PlayedStream) -> None:
            await stream.accept()
            await stream.write(drain=wire.Drain(reason=reason))
            assert await stream.read() is None  # it half-closes, since nothing is in flight
            drains.append(reason)

        return play

    async with played_bus(say("shutdown"), say("requested")) as bus, plugin_with(bus.address, add) as plugin:
        with pytest.raises(PeerLost, match="operator"):
            await within(plugin.ended())
        assert drains == ["shutdown", "requested"]
        assert bus.streams == 2


async def test_a_plugin_at_the_http_port_of_a_bus_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        running_bus(http="127.0.0.1:0") as bus,
        Plugin("weather", address=str(bus.http_address)),
    ):
        text = f"the server at {bus.http_address} speaks HTTP, not gRPC: give the bus's gRPC address"
        await within(until(lambda: text in caplog.text, "the reason"))
