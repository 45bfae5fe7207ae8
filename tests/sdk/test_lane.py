"""The lane at the SDK's end: when it is used, and how its streams end."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.sdk.connection_cases import add, free_address, plugin_with
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.bus.config import Config
from toolbus.errors import PeerLost, RequestError, SetupError
from toolbus.protocol.lane import HEADER, MESSAGE_ITEMS, FrameKind, lane_names
from toolbus.protocol.session import Outbox
from toolbus.sdk import Host, Plugin
from toolbus.sdk.bus_address import BusAddress
from toolbus.sdk.connection_settings import TIMINGS
from toolbus.sdk.grpc_transport import GrpcTransport
from toolbus.sdk.transport import LaneTransport, connect_lane
from toolbus.v1 import tool_bus_service_pb2 as wire

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the lane is on Linux only"),
]


@pytest.fixture(autouse=True)
def lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLBUS_LANE", raising=False)


def bus_at(address: str = "127.0.0.1:0", **settings: Any) -> Bus:
    return Bus(Config(grpc=(address,), http="off", **settings))


def transports(bus: Bus) -> set[str]:
    return {peer.address.partition(":")[0] for peer in bus.core.sessions.presence.sessions.values()}


# -- which transport --------------------------------------------------------------------------------------------------


async def test_plugins_and_hosts_use_the_lane_beside_a_port_and_beside_a_unix_socket(tmp_path: Any) -> None:
    tmp_path.chmod(0o700)
    for address in ("127.0.0.1:0", "localhost:0", f"unix:{tmp_path}/bus.sock"):
        async with bus_at(address) as bus:
            at = bus.grpc_addresses[0]
            async with plugin_with(at, add) as plugin, Host(at) as host:
                await plugin.ready()
                assert (await host.call("add", {"a": 1, "b": 2})).output == 3
                assert transports(bus) == {"lane"}


@pytest.mark.parametrize("value", ["off", "0", "False", "no"])
async def test_the_variable_switches_it_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBUS_LANE", value)
    async with bus_at() as bus, plugin_with(bus.grpc_addresses[0], add) as plugin:
        await plugin.ready()
        assert transports(bus) == {"ipv4"}


async def test_a_variable_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBUS_LANE", "fast")
    with pytest.raises(SetupError, match="TOOLBUS_LANE is 'fast', it must be on or off"):
        Plugin("calc")


async def test_without_a_lane_a_peer_uses_grpc_and_logs_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async with bus_at(lane=False) as bus, plugin_with(bus.grpc_addresses[0], add) as plugin:
        await plugin.ready()
        assert transports(bus) == {"ipv4"}
    assert not [each for each in caplog.records if each.name == "toolbus.sdk.connection" and each.levelno > 20]


async def test_a_peer_leaves_the_lane_of_another_users_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bus_at() as bus:
        address = BusAddress.parse(bus.grpc_addresses[0])
        stranger = os.geteuid() + 4711
        with monkeypatch.context() as patch:
            patch.setattr("toolbus.sdk.transport.program_of", lambda connection: (1, stranger))
            assert connect_lane(address) is None
            async with plugin_with(address.text, add) as plugin:
                await plugin.ready()
                assert transports(bus) == {"ipv4"}
        connection = connect_lane(address)
        assert connection is not None
        connection.close()


async def test_a_user_outside_this_namespace_is_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bus_at() as bus:
        monkeypatch.setattr("toolbus.sdk.transport.unmapped_uid", os.geteuid)
        monkeypatch.setattr("toolbus.sdk.transport.program_of", lambda connection: (1, os.geteuid()))
        assert connect_lane(BusAddress.parse(bus.grpc_addresses[0])) is None


async def test_an_address_with_tls_has_no_lane() -> None:
    async with bus_at() as bus:
        assert connect_lane(BusAddress.parse(f"tls:{bus.grpc_addresses[0]}")) is None


# -- a session on it --------------------------------------------------------------------------------------------------


async def test_tools_that_do_not_fit_into_the_attach_follow() -> None:
    async with bus_at() as bus:
        plugin = Plugin("calc", address=bus.grpc_addresses[0], _timings=replace(TIMINGS, attach_bytes=300))
        for number in range(9):
            plugin.add_tool(lambda: None, name=f"tool{number}", description="Does a little. " * 10)
        async with plugin, Host(bus.grpc_addresses[0]) as host:
            await plugin.ready()
            assert [each.name for each in await host.list()] == [f"tool{number}" for number in range(9)]
            assert transports(bus) == {"lane"}


async def test_large_arguments_and_results_arrive_whole_in_both_directions() -> None:
    async with bus_at() as bus:
        plugin = Plugin("calc", address=bus.grpc_addresses[0])
        plugin.add_tool(lambda text: text * 3, name="triple", parameters={"properties": {"text": {"type": "string"}}})
        async with plugin, Host(bus.grpc_addresses[0]) as host:
            await plugin.ready()
            texts = [chr(97 + number) * 1_000_000 for number in range(4)]
            results = await asyncio.gather(*(host.call("triple", {"text": text}) for text in texts))
            assert [result.output for result in results] == [text * 3 for text in texts]


async def test_a_plugin_that_leaves_finishes_its_calls() -> None:
    async with bus_at() as bus:
        begun, go = asyncio.Event(), asyncio.Event()

        async def slow() -> str:
            begun.set()
            await go.wait()
            return "done"

        async with Host(bus.grpc_addresses[0]) as host:
            plugin = plugin_with(bus.grpc_addresses[0], slow)
            await plugin.start()
            await plugin.ready()
            call = asyncio.create_task(host.call("slow"))
            await begun.wait()
            closing = asyncio.create_task(plugin.close(WAIT_SECONDS))
            await until(lambda: any(peer.drain_sent or peer.state.value == "leaving" for peer in peers(bus)), "a drain")
            go.set()
            assert (await call).output == "done"
            await closing


def peers(bus: Bus) -> list[Any]:
    return list(bus.core.sessions.presence.sessions.values())


async def test_a_peer_is_back_after_a_restart_of_the_bus() -> None:
    """Over which transport is the bus's start against the peer's attempt: one that comes first finds no lane yet."""
    address = free_address()
    async with bus_at(address) as bus:
        plugin = plugin_with(address, add)
        await plugin.start()
        await plugin.ready()
        assert transports(bus) == {"lane"}
    async with bus_at(address) as bus:
        await until(lambda: bus.list(), "the tool to be offered again")
        assert (await bus.call("add", {"a": 1, "b": 2})).output == 3
        await plugin.close()


@pytest.mark.parametrize(("value", "kind"), [("on", LaneTransport), ("off", GrpcTransport)])
async def test_a_transport_is_freed_with_its_attempt(
    value: str, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grpc keeps a connection as long as objects refer to it; a collection of garbage may come late."""
    monkeypatch.setenv("TOOLBUS_LANE", value)

    def transports_left() -> int:
        return sum(type(each) is kind for each in gc.get_objects())

    gc.collect()
    before = transports_left()
    gc.disable()
    try:
        async with bus_at() as bus:
            async with Host(bus.grpc_addresses[0]) as host:
                await host.list()
                assert transports_left() == before + 1
            await until(lambda: transports_left() == before, "the transport to be freed")
    finally:
        gc.enable()


# -- a bus that a test plays ------------------------------------------------------------------------------------------

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def played_lane(play: Play) -> AsyncIterator[str]:
    """Listens on the lane beside a port where nobody listens."""
    address, served = free_address(), set[asyncio.Task[Any]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        try:
            await play(reader, writer)
        finally:
            writer.close()
            served.discard(task)

    server = await asyncio.start_unix_server(serve, lane_names(address)[0], limit=1 << 25)
    yield address
    server.close()
    for task in list(served):
        task.cancel()
    await asyncio.gather(*served, return_exceptions=True)


def send(writer: asyncio.StreamWriter, kind: int, payload: bytes) -> None:
    writer.write(HEADER.pack(len(payload), kind) + payload)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads the opening and the attach, and answers them."""
    for _ in range(2):
        size, _kind = HEADER.unpack(await reader.readexactly(HEADER.size))
        await reader.readexactly(size)
    attached = wire.Attached(session_id="s", heartbeat_seconds=10.0)
    send(writer, FrameKind.MESSAGE, wire.InvokeResponse(attached=attached).SerializeToString())


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (HEADER.pack(0, FrameKind.STATUS), "UNKNOWN"),
        (HEADER.pack(11, FrameKind.STATUS) + b"ABORTED\nwhy", "why"),
        (HEADER.pack(2, FrameKind.MESSAGE) + b"\xff\xff", "not a message"),
        (HEADER.pack(1 << 30, FrameKind.MESSAGE), f"{1 << 30} bytes"),
        (b"", "broke"),
        (HEADER.pack(9, FrameKind.MESSAGE) + b"part", "broke"),
    ],
)
async def test_a_stream_that_the_bus_ends_badly_is_lost_with_the_reason(
    frame: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        writer.write(frame)

    async with played_lane(play) as address, Host(address, source="caller"):
        await until(lambda: "lost the bus" in caplog.text, "the stream to be lost")
    assert words in caplog.text


async def test_a_fatal_status_ends_the_peer_with_the_text_of_the_bus() -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HEADER.size)
        send(writer, FrameKind.STATUS, b"FAILED_PRECONDITION\nversion 1 is not spoken here")
        await reader.read()

    async with played_lane(play) as address, plugin_with(address, add) as plugin:
        with pytest.raises(RequestError, match="version 1 is not spoken here"):
            await asyncio.wait_for(plugin.ready(), WAIT_SECONDS)


async def test_pending_calls_end_at_once_when_the_connection_breaks() -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        await reader.readexactly(HEADER.size)  # a call

    async with played_lane(play) as address, Host(address, source="caller") as host:
        result = await asyncio.wait_for(host.call("add", {"a": 1}, timeout=2.0), WAIT_SECONDS)
        assert result.error is not None


async def test_a_bus_that_does_not_read_holds_up_only_what_is_sent_to_it() -> None:
    reads = asyncio.Event()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        await reads.wait()
        await reader.read()

    async with played_lane(play) as address, Host(address, source="caller") as host:
        calls = [asyncio.create_task(host.call("add", {"text": "x" * 900_000}, timeout=0.5)) for _ in range(8)]
        results = await asyncio.wait_for(asyncio.gather(*calls), WAIT_SECONDS)
        assert all(result.error is not None for result in results)
        reads.set()


async def test_a_full_message_is_written_before_the_loop_has_its_next_turn() -> None:
    ours, other = socket.socketpair()
    with other:
        ours.setblocking(False)
        outbox = Outbox(wire.InvokeRequest)
        lane = LaneTransport(ours, BusAddress.parse("127.0.0.1:1"), outbox, asyncio.get_running_loop())
        ended = asyncio.create_task(lane.ended())
        await until(lambda: lane.may_write, "the connection")
        other.recv(1 << 16)  # the opening
        for _ in range(2 * MESSAGE_ITEMS + 1):
            outbox.room(10).calls.add(call_id="x")
        read, counts = other.recv(1 << 16), list[int]()
        while read:
            size, _kind = HEADER.unpack_from(read)
            begin, end = HEADER.size, HEADER.size + size
            counts.append(len(wire.InvokeRequest.FromString(read[begin:end]).calls))
            read = read[end:]
        assert counts == [MESSAGE_ITEMS, MESSAGE_ITEMS]
        await lane.close()
        await ended
        await until(lambda: not lane.may_write, "the end of the connection")


async def test_a_unary_rpc_ends_with_its_peer() -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size, _ = HEADER.unpack(await reader.readexactly(HEADER.size))
        if await reader.readexactly(size) == b"Invoke":
            size, _ = HEADER.unpack(await reader.readexactly(HEADER.size))
            await reader.readexactly(size)
            attached = wire.Attached(session_id="s", heartbeat_seconds=10.0)
            send(writer, FrameKind.MESSAGE, wire.InvokeResponse(attached=attached).SerializeToString())
        await reader.read()

    async with played_lane(play) as address:
        host = await Host(address, source="caller").__aenter__()
        listing = asyncio.create_task(host.list())
        await asyncio.sleep(0.05)
        await host.close()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(listing, WAIT_SECONDS)
