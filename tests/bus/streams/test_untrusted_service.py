"""The way in for programs that are trusted less: what the port takes, and that it takes nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.faults.raw_peer import RawPeer, echo, opening, tool
from tests.support.core_model import Core
from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.bus.rooms.streams_room import StreamsRoom
from toolbus.bus.streams.grpc_server import CONNECTION_STREAMS
from toolbus.bus.streams.server_handshake import GUARDED_SESSIONS
from toolbus.errors import SetupError
from toolbus.protocol.tool import Limits
from toolbus.sdk import Host, Plugin
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb
from toolbus.v1.tool_bus_service_pb2_grpc import ToolBusServiceStub

DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED
HIGH = pb.CallContext(user_id="root", attributes={"level": "99"})


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with running_bus() as bus:
        bus.dispatcher.admission.settled_at = 0.0  # a bus that has just started calls unknown names UNAVAILABLE
        yield bus


def _says(text: str) -> Callable[[pb.ToolCall], pb.ToolResult]:
    return lambda call: pb.ToolResult(call_id=call.call_id, output_json=json.dumps(text))


async def _refusal(answer: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await answer
    return failure.value.code(), failure.value.details() or ""


@pytest.mark.parametrize(
    ("source", "token", "says"),
    [
        ("nobody", "t", "source 'nobody' is not guarded"),
        ("dropins", "t", "source 'dropins' is not guarded"),
        ("toolbus", "t", "source 'toolbus' is not guarded"),
        ("dropin", "", "carries no token"),
    ],
)
async def test_an_attach_of_a_trusted_source_or_without_a_token_is_refused(
    bus: Bus, source: str, token: str, says: str
) -> None:
    async with RawPeer(await bus.dropin_address()) as peer:
        status, text = await peer.refused(opening(source, tool("t"), token=token))
        assert (status, says in text) == (DENIED, True), text


async def test_a_later_attach_on_the_same_stream_is_checked_too(bus: Bus) -> None:
    async with RawPeer(await bus.dropin_address()) as peer:
        await peer.attach("dropin", token="t")
        await peer.send(attach=wire.Attach(protocol_version=1, source="dropin"))
        assert (await peer.ended())[0] is DENIED


async def test_an_untrusted_source_offers_answers_registers_and_withdraws(bus: Bus) -> None:
    async with RawPeer(await bus.dropin_address(), answer=echo) as peer:
        session = (await peer.attach("dropin", tool("a"), token="t")).session_id
        await peer.stub.Register(wire.RegisterRequest(session_id=session, tools=[tool("b")]))
        assert [each.entry.name for each in bus.list()] == ["a", "b"]
        assert (await bus.call("b", {"x": 1})).output == {"x": 1}
        await peer.stub.Unregister(wire.UnregisterRequest(session_id=session, name="a"))
        assert [each.entry.name for each in bus.list()] == ["b"]


async def test_an_untrusted_source_gets_no_call_that_is_meant_for_a_trusted_one(bus: Bus) -> None:
    async with (
        RawPeer(bus.grpc_addresses[0], answer=_says("trusted")) as own,
        RawPeer(await bus.dropin_address(), answer=_says("untrusted")) as peer,
    ):
        await own.attach("own", tool("a"))
        session = (await peer.attach("dropin", tool("a"), token="t")).session_id
        await peer.stub.Register(wire.RegisterRequest(session_id=session, tools=[tool("a")]))
        assert [each.entry.name for each in bus.list()] == ["a", "dropin:a"]
        assert (await bus.call("a", {})).output == "trusted"
        assert (await bus.call("dropin:a", {})).output == "untrusted"


@pytest.mark.parametrize("late", [False, True], ids=["at the attach", "registered later"])
async def test_the_hints_of_an_untrusted_source_are_shown_and_not_believed(bus: Bus, late: bool) -> None:
    hints = pb.ToolAnnotations(read_only=True, idempotent=True)
    async with RawPeer(await bus.dropin_address()) as peer:
        declared = tool("a", annotations=hints)
        session = (await peer.attach("dropin", *([] if late else [declared]), token="t")).session_id
        if late:
            await peer.stub.Register(wire.RegisterRequest(session_id=session, tools=[declared]))
        (listing,) = bus.list()
        assert listing.tool.annotations.read_only
        assert not listing.tool.reads_only
        assert not listing.tool.repeatable


async def test_list_clear_and_requests_without_a_session_of_an_untrusted_source_are_refused(bus: Bus) -> None:
    url = tool("t", callback_url="http://127.0.0.1:9/call")
    async with RawPeer(bus.grpc_addresses[0]) as host, RawPeer(await bus.dropin_address()) as peer:
        other = (await host.attach("host", tool("kept"))).session_id
        await peer.attach("dropin", token="t")
        for request, says in (
            (wire.ListRequest(), "takes no List"),
            (wire.ClearRequest(source="host"), "takes no Clear"),
            (wire.RegisterRequest(tools=[url]), "only for a session of a guarded source"),
            (wire.UnregisterRequest(name="kept"), "only for a session of a guarded source"),
            (wire.RegisterRequest(session_id=other, tools=[tool("t")]), "only for a session of a guarded source"),
            (wire.UnregisterRequest(session_id=other, name="kept"), "only for a session of a guarded source"),
        ):
            method = getattr(peer.stub, type(request).__name__.removesuffix("Request"))
            status, text = await _refusal(method(request))
            assert (status, says in text) == (DENIED, True), text
        refusal = await _refusal(peer.stub.Register(wire.RegisterRequest(session_id="x", tools=[tool("t")])))
        assert refusal[0] is not DENIED
        assert [each.entry.name for each in bus.list()] == ["kept"]


async def test_there_is_neither_health_nor_reflection(bus: Bus) -> None:
    async with grpc.aio.insecure_channel(await bus.dropin_address()) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await _refusal(health.Check(health_pb2.HealthCheckRequest())))[0] is UNKNOWN
        info = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        answers = info(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        assert (await _refusal(anext(aiter(answers))))[0] is UNKNOWN


@pytest.mark.parametrize("way", ["the guarded port", "the bus's own address"])
@pytest.mark.parametrize("offers", [False, True])
async def test_calls_of_an_untrusted_source_have_no_user_and_level_0_and_administer_nothing(
    bus: Bus, way: str, offers: bool
) -> None:
    address = await bus.dropin_address() if way == "the guarded port" else bus.grpc_addresses[0]
    async with RawPeer(bus.grpc_addresses[0], answer=_who) as plugin, RawPeer(address) as peer:
        await plugin.attach("plugin", tool("open"), tool("high", min_level=50))
        await peer.attach("dropin", *([tool("own")] if offers else []), token="t")
        assert (await peer.call("open", context=HIGH)).output_json == '["", {}]'
        assert (await peer.call("high", context=HIGH)).error.code == pb.ERROR_CODE_NOT_FOUND
        for name, arguments in {
            "drain": {},
            "stats": {},
            "dropin_address": {},
            "revoke": {"source": "plugin"},
            "permit": {"kind": "tools", "name": "open", "users": []},
        }.items():
            refused = await peer.call(f"toolbus:{name}", arguments, context=HIGH)
            assert refused.error.code == pb.ERROR_CODE_PERMISSION_DENIED
        seen = await peer.call("toolbus:this_bus", {"kind": "stats"}, context=HIGH)
        assert seen.output_json == '{"outcomes":{}}'


def _who(call: pb.ToolCall) -> pb.ToolResult:
    text = f'["{call.context.user_id}", {{{", ".join(call.context.attributes)}}}]'
    return pb.ToolResult(call_id=call.call_id, output_json=text)


def test_an_untrusted_source_may_not_set_a_context_wherever_it_attaches() -> None:
    core = Core(untrusted=("dropin", "dropin:*"))
    assert core.attached("dropin:a").peer.may_set_context is False
    assert core.attached("host").peer.may_set_context is True


async def test_drop_in_sources_attach_and_administer_nothing_where_the_configuration_guards_others() -> None:
    async with running_bus(guarded=("weather",)) as bus:
        address = await bus.dropin_address()
        for source in ("dropin:a", "weather"):
            async with RawPeer(address) as peer:
                await peer.attach(source, token="t")
                assert (await peer.call("toolbus:stats")).error.code == pb.ERROR_CODE_PERMISSION_DENIED


async def test_the_first_token_binds_the_source_on_both_ports(bus: Bus) -> None:
    async with RawPeer(await bus.dropin_address()) as first:
        await first.attach("dropin", token="mine")
        for address in (await bus.dropin_address(), bus.grpc_addresses[0]):
            async with RawPeer(address) as thief:
                status, text = await thief.refused(opening("dropin", tool("t"), token="another"))
                assert (status, "bound to a token" in text) == (DENIED, True)


async def test_it_cannot_use_up_the_streams_of_the_bus() -> None:
    async with running_bus(limits=Limits(sessions=40)) as bus, Host(bus.grpc_addresses[0]) as host:
        peers = [RawPeer(await bus.dropin_address()) for _ in range(3)]
        await peers[0].attach("dropin", token="t")
        await peers[1].attach("dropin", token="t")
        status, text = await peers[2].refused(opening("dropin", token="t"))
        assert (status, "sessions" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        assert (await host.call("toolbus:stats")).output["sessions"] == 3
        for peer in peers:
            await peer.close()


# -- the port ----------------------------------------------------------------------------------------------------------


async def test_it_is_opened_once_on_request_and_closed_with_the_bus() -> None:
    async with running_bus() as bus:
        first, *others = await asyncio.gather(*(bus.dropin_address() for _ in range(3)))
        address = (await bus.call("toolbus:dropin_address", {"port": 1})).output
        assert {*others, address} == {first}
        assert first not in bus.grpc_addresses
        host, _, port = first.rpartition(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5)
    with pytest.raises(SetupError, match="the bus does not listen"):
        await bus.dropin_address()


async def test_the_preferred_port_is_taken_if_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with running_bus() as bus:
            assert await bus.dropin_address(port) != f"127.0.0.1:{port}"
    async with running_bus() as bus:
        assert await bus.dropin_address(port) == f"127.0.0.1:{port}"


async def test_an_invalid_port_is_refused_with_the_rule() -> None:
    async with running_bus() as bus:
        refused = (await bus.call("toolbus:dropin_address", {"port": 70_000})).error
        assert refused is not None
        assert "port is 70000: use a number from 1 to 65535, or 0 for any free port" in refused.message


async def test_draining_lets_calls_of_untrusted_sources_end() -> None:
    went_on = asyncio.Event()
    async with running_bus() as bus, Plugin("dropin", address=await bus.dropin_address(), token="t") as plugin:

        @plugin.tool
        async def slow() -> str:
            """Waits."""
            await went_on.wait()
            return "done"

        await plugin.ready()
        async with Host(bus.grpc_addresses[0]) as host:
            await host.ready()
            called = asyncio.create_task(host.call("slow", {}))
            while not bus.dispatcher.in_flight.active:
                await asyncio.sleep(0)
            draining = asyncio.create_task(bus.drain())
            await asyncio.sleep(0)
            went_on.set()
            assert (await called).output == "done"
        await draining


async def test_one_guarded_source_has_some_of_the_sessions_and_leaves_the_others_theirs(bus: Bus) -> None:
    address = await bus.dropin_address()
    async with AsyncExitStack() as stack:

        async def peer() -> RawPeer:
            return await stack.enter_async_context(RawPeer(address))

        for number in range(GUARDED_SESSIONS):
            await (await peer()).attach("dropin", token="t", instance=f"i{number}")
        status, text = await (await peer()).refused(opening("dropin", token="t", instance="more"))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"'dropin' has {GUARDED_SESSIONS}" in text
        await (await peer()).attach("dropin", token="t", instance="i0")  # takes over
        await (await peer()).attach("dropin:kb", token="u")


async def test_one_connection_of_a_sandbox_has_so_many_streams_at_once_and_the_others_wait_in_the_client(
    bus: Bus,
) -> None:
    async with grpc.aio.insecure_channel(await bus.dropin_address()) as channel:
        stub: Any = ToolBusServiceStub(channel)
        streams = [stub.Invoke() for _ in range(CONNECTION_STREAMS + 20)]
        streams_room = bus.core.rooms.find(StreamsRoom)
        assert streams_room is not None
        opened = streams_room.listeners._untrusted_service._open
        await until(lambda: len(opened) == CONNECTION_STREAMS, "the streams that may be open")
        await asyncio.sleep(0.1)  # would more come, they would by now
        assert len(opened) == CONNECTION_STREAMS
        for stream in streams[:20]:
            stream.cancel()
        await until(lambda: len(opened) == CONNECTION_STREAMS, "those that waited")
        for stream in streams:
            stream.cancel()
        await until(lambda: not opened, "the end of all")
