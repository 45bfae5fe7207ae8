"""Tests that what passes through the bus does not stay in it: big frames, refused calls, sessions that come and go."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import partial

import psutil
import pytest

from tests.faults.conftest import Connect, stats, until_sessions
from tests.faults.raw_peer import RawPeer, attach, echo, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.protocol.tool import MIB
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

pytestmark = pytest.mark.usefixtures("bystander")


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


async def _busy(peer: RawPeer, name: str) -> tuple[int, int]:
    """How many calls the sessions of a tool have in flight, and stuck."""
    (line,) = (await peer.stub.List(wire.ListRequest(names=[name]))).tools
    return line.in_flight, line.stuck


def _all_cancelled(plugin: RawPeer) -> bool:
    return len(plugin.cancels) == len(plugin.calls)


async def test_300_frames_of_a_megabyte_are_not_kept_by_the_tiny_calls_in_them(connect: Connect) -> None:
    await connect("plugin", tool("wait"), max_in_flight=1_000)
    host = await connect("host", max_in_flight=1_000)
    filler = pb.ToolResult(call_id="not in flight", output_json="x" * 1_000_000)
    calls = [host.ask("wait", {"n": n}, context=pb.CallContext(user_id="ada")) for n in range(310)]
    for call in calls[:10]:
        await host.send_frame(wire.InvokeRequest(calls=[call], results=[filler]))
    before = resident()
    for call in calls[10:]:
        await host.send_frame(wire.InvokeRequest(calls=[call], results=[filler]))
    assert not (await host.call("steady")).is_error  # so all of them have been read
    assert resident() - before < 100 * MIB


async def test_idle_streams_keep_nothing_of_the_last_message_that_came(connect: Connect) -> None:
    filler = pb.ToolResult(call_id="not in flight", output_json="x" * 8_000_000)
    peers = [await connect(f"host:{number}") for number in range(20)]
    before = resident()
    for peer in peers:
        await peer.send_frame(wire.InvokeRequest(calls=[peer.ask("steady")], results=[filler]))
        await until(lambda peer=peer: peer.results, "the result")  # type: ignore[misc]  # so it has been read
    assert resident() - before < 80 * MIB


async def test_progress_and_results_of_a_megabyte_leave_nothing_behind(bus: Bus, connect: Connect) -> None:
    plugin = await connect("plugin", tool("big"))
    host = await connect("host")

    async def round_trips(number: int) -> None:
        for _ in range(number):
            (future,) = await host.start(host.ask("big", {"s": "x" * 500_000}))
            await until(lambda: plugin.calls, "the call")
            call = plugin.calls.pop()
            chunk = pb.ToolProgress(call_id=call.call_id, output_chunk="x" * 1_000_000)
            await plugin.send(progress=[chunk], results=[echo(call)])
            await asyncio.wait_for(future, WAIT_SECONDS)
            for kept in (plugin.frames, host.frames, host.results, host.progress):
                kept.clear()

    await round_trips(20)
    before = resident()
    await round_trips(100)  # 50 MB of calls, 100 MB of progress
    assert resident() - before < 40 * MIB
    assert (await _busy(host, "big")) == (0, 0)


async def test_refused_calls_leave_no_state(bus: Bus, connect: Connect) -> None:
    plugin = await connect("plugin", tool("strict", {"type": "object", "required": ["n"]}))
    host = await connect("host")

    async def refused(number: int) -> None:
        for _ in range(number // 100):
            calls = [host.ask("strict"), host.ask("nothing"), host.ask("strict", "{"), host.ask("x", role="nobody")]
            await host.send(calls=calls * 25)
            await until(lambda: len(host.results) == 100, "the refusals")
            assert all(result.is_error for result in host.results)
            host.results.clear()
            host.frames.clear()

    await refused(2_000)  # so that the records are full
    before = resident()
    await refused(10_000)
    assert resident() - before < 10 * MIB  # a kilobyte of each
    assert (await _busy(host, "strict")) == (0, 0)
    # The limit of calls in flight is untouched, so none of them is thought to be there still.
    plugin.answer = echo
    futures = await host.start(*(host.ask("strict", {"n": n}) for n in range(256)))
    assert not any(result.is_error for result in await asyncio.wait_for(asyncio.gather(*futures), WAIT_SECONDS))


async def test_refused_calls_with_names_of_megabytes_are_not_kept_in_the_records(bus: Bus, connect: Connect) -> None:
    host = await connect("host")
    long = "x" * 1_000_000
    for number in range(60):
        await host.send(calls=[pb.ToolCall(call_id=f"c{number}", name=long)])
    await until(lambda: len(host.results) == 60, "the refusals")
    assert sum(len(record.name) + len(record.call_id) for record in bus.records) < MIB


async def test_sessions_that_come_and_go_leave_no_state(bus: Bus, connect: Connect) -> None:
    host = await connect("host")
    before = await stats(bus)
    peer = RawPeer(bus.grpc_addresses[0])
    for number in range(60):
        peer.open()
        await peer.attach(f"passing.{number}", tool(f"t{number}"), instance="one")
        if number % 2:
            await peer.send(drain=wire.Drain())
        else:
            await peer.half_close()
        await peer.ended()
    await peer.close()
    await until(lambda: len(bus.list(include_offline=True)) == 1, "their tools to be forgotten")
    await until_sessions(bus, before["sessions"])
    assert (await stats(bus))["sources"] == before["sources"]
    assert not (await host.call("steady")).is_error


@pytest.mark.parametrize("drains", [True, False])
async def test_a_session_is_freed_with_its_end_and_not_by_the_next_garbage_collection(
    bus: Bus, connect: Connect, drains: bool
) -> None:
    peer = await connect("plugin", tool("t"), answer=echo)
    assert not (await (await connect("host")).call("t")).is_error
    (session,) = map(weakref.ref, bus.core.sessions.presence.by_source["plugin"].values())
    gc.disable()
    try:
        if drains:
            await peer.send(drain=wire.Drain())
            await peer.ended()
        await peer.close()
        await until(lambda: session() is None, "the end of the session")
    finally:
        gc.enable()


async def test_unread_calls_of_dead_callers_leave_no_state(bus: Bus, connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"), max_in_flight=500)
    for round_ in range(1, 4):
        host = await connect("host")
        await host.start(*(host.ask("t", {"s": "x" * 10_000}) for _ in range(100)))
        await plugin.received(100 * round_)
        await host.close()
        await until(partial(_all_cancelled, plugin), "the cancels")
        await plugin.send(results=[pb.ToolResult(call_id=call.call_id) for call in plugin.calls[-100:]])
    async with asyncio.timeout(WAIT_SECONDS):
        while await _busy(plugin, "t") != (0, 0):
            pass


async def test_a_flood_of_takeovers_leaves_no_state_behind_the_newest(bus: Bus, connect: Connect) -> None:
    for number in range(40):
        peer = await connect("flood", tool("t"), instance=f"i{number}")
        await peer.send(attach=attach("flood", tool("u"), instance=f"i{number}"))
        await peer.close()
    await until_sessions(bus, 2)
    await until(lambda: not [t for t in bus.list(include_offline=True) if t.source == "flood"], "the tools to go")
