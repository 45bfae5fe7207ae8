from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.sdk.played_bus import PlayedStream, played_bus
from tests.support.waiting import within
from toolbus.sdk.connection_settings import ConnectionTimings
from toolbus.sdk.host import Host
from toolbus.sdk.plugin_client import Plugin
from toolbus.sdk.reconnect import backoff
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb


def plugin_with(address: str, function: Any, **options: Any) -> Plugin:
    plugin = Plugin("calc", address=address, **options)
    plugin.add_tool(function)
    return plugin


def add(a: int, b: int) -> int:
    return a + b


async def test_a_bus_that_stops_answering_is_left_and_reconnected() -> None:
    async def fall_silent(stream: PlayedStream) -> None:
        await stream.accept(heartbeat_seconds=0.05)
        await stream.read()

    async def accept(stream: PlayedStream) -> None:
        await stream.accept()
        again.set()
        await stream.read()

    again = asyncio.Event()
    async with played_bus(fall_silent, accept) as bus, plugin_with(bus.address, add) as plugin:
        await within(plugin.ready())
        await within(again.wait())  # far below the time that a handshake may take


async def test_a_bus_that_never_answers_the_attach_is_given_up() -> None:
    async def stay_silent(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        assert await stream.read() is None

    async def accept(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.read()

    timings = ConnectionTimings(handshake=0.5)
    async with played_bus(stay_silent, accept) as bus, plugin_with(bus.address, add, _timings=timings) as plugin:
        await within(plugin.ready())
        assert bus.streams >= 2  # more where a busy machine took too long to accept


@pytest.mark.parametrize("live", [False, True])
async def test_a_plugin_that_leaves_sends_its_drain_and_answers_what_crosses_it(live: bool) -> None:
    seen: list[str] = []

    async def call_after_the_drain(stream: PlayedStream) -> None:
        if live:
            await stream.accept()
        else:
            await stream.read_until("attach")
        attached.set()
        drain = stream.context.read  # `PlayedStream.read` ends here, as a bus does
        while not (await within(drain())).HasField("drain"):
            pass
        if not live:
            await stream.write(attached=wire.Attached(session_id="s"))
        await stream.write(calls=[pb.ToolCall(call_id="1", name="add", arguments_json='{"a":1,"b":2}')])
        seen.append((await within(drain())).results[0].output_json)

    attached = asyncio.Event()
    async with played_bus(call_after_the_drain) as bus:
        plugin = plugin_with(bus.address, add)
        await plugin.start()
        await within(attached.wait())
        await within(plugin.close())
    assert seen == ["3"]


async def test_limits_that_a_bus_leaves_unset_have_their_defaults() -> None:
    async def call_for_large_results(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        calls = [pb.ToolCall(call_id=str(size), name="big", arguments_json=f'{{"size":{size}}}') for size in sizes]
        await stream.write(attached=wire.Attached(session_id="s"), calls=calls)
        while len(codes) < len(sizes) and (frame := await stream.read()) is not None:
            codes.update({int(result.call_id): result.error.code for result in frame.results})
        answered.set()
        await stream.read()

    def big(size: int) -> str:
        return "x" * (size - 2)  # and two quotes

    async def accept(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        await stream.write(attached=wire.Attached(session_id="s"))
        await stream.read()

    sizes = [2, 4 << 20, (4 << 20) + 1]
    codes: dict[int, int] = {}
    answered = asyncio.Event()
    async with played_bus(call_for_large_results, accept) as bus, plugin_with(bus.address, big):
        await within(answered.wait())
        async with Host(bus.address) as host:
            error = (await within(host.call("add", {"a": "x" * (1 << 20)}))).error
        assert error is not None
        assert error.limit == ("arguments_bytes", float(1 << 20))
    assert codes == {2: 0, 4 << 20: 0, (4 << 20) + 1: pb.ERROR_CODE_RESULT_TOO_LARGE}


async def test_a_small_limit_for_results_holds_too() -> None:
    async def call(stream: PlayedStream) -> None:
        await stream.accept(result_bytes=100)
        calls = [pb.ToolCall(call_id=str(size), name="big", arguments_json=f'{{"size":{size}}}') for size in (98, 99)]
        await stream.write(calls=calls)
        while len(codes) < 2 and (frame := await stream.read()) is not None:
            codes.update({int(result.call_id): result.error.code for result in frame.results})
        answered.set()
        await stream.read()

    def big(size: int) -> str:
        return "x" * size

    codes: dict[int, int] = {}
    answered = asyncio.Event()
    async with played_bus(call) as bus, plugin_with(bus.address, big):
        await within(answered.wait())
    assert codes == {98: 0, 99: pb.ERROR_CODE_RESULT_TOO_LARGE}


def test_pauses_grow_to_a_limit_and_none_is_near_zero_at_a_bus_that_refuses() -> None:
    timings = ConnectionTimings(first_pause=0.1, max_pause=1.0, max_refused_pause=4.0)
    for failures in range(12):
        lost = [backoff(failures, timings, refused=False) for _ in range(50)]
        refused = [backoff(failures, timings, refused=True) for _ in range(50)]
        assert all(0.0 <= pause <= min(1.0, 0.1 * 2**failures) for pause in lost)
        assert all(min(4.0, 2**failures) / 2 <= pause <= min(4.0, 2**failures) for pause in refused)
