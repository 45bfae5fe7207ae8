"""The gRPC side of a running bus, seen by raw stubs: catalog over the unary RPCs, events, reflection."""

# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name
from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.faults.conftest import (
    Connect,
    address,
    bus,
    connect,
    grace_seconds,
    limits,
    stranger,
    timings,
)
from tests.faults.raw_peer import RawPeer, echo, tool
from tests.support.others_files import OTHERS, somebody_elses
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.errors import SetupError
from toolbus.sdk import Host
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb
from toolbus.v1.tool_bus_service_pb2_grpc import ToolBusServiceStub

WATCH = wire.SUBSCRIPTION_CATALOG


def _changes(peer: RawPeer) -> list[wire.CatalogChange]:
    return [event.catalog for event in peer.events if event.HasField("catalog")]


def _names(listed: object) -> list[str]:
    return [item.tool.name for item in listed]  # type: ignore[attr-defined]


async def test_attached_says_who_the_bus_is_and_what_it_takes(connect: Connect) -> None:
    peer = await connect("peer", tool("t"), max_in_flight=7)
    assert peer.attached is not None
    assert len(peer.attached.session_id) == 32
    assert peer.attached.bus_id
    assert peer.attached.boot_id
    assert peer.attached.protocol_version == 1
    assert peer.attached.heartbeat_seconds > 0
    assert list(peer.attached.registered) == ["t"]
    assert not peer.attached.refused
    limits = peer.attached.limits
    assert (limits.calls_in_flight, limits.message_bytes) == (7, 16 * 1024 * 1024)
    assert limits.grace_seconds == pytest.approx(0.3)


async def test_a_heartbeat_of_the_peers_own_is_echoed_behind_what_the_bus_has_sent_before(connect: Connect) -> None:
    peer = await connect("peer")
    assert peer.attached is not None
    assert peer.attached.echoes
    heartbeat_sent = wire.Heartbeat(sequence=2**64 - 1, from_peer=True)
    await peer.send(calls=[peer.ask("none")], heartbeat=heartbeat_sent)
    await until(lambda: peer.echoed, "the echo")
    assert peer.echoed == [heartbeat_sent]
    assert [result.error.code for result in peer.results] == [pb.ERROR_CODE_NOT_FOUND]


async def test_no_session_gets_more_calls_in_flight_than_the_bus_grants(connect: Connect) -> None:
    peer = await connect("peer", max_in_flight=1_000_000)
    assert peer.attached is not None
    assert peer.attached.limits.calls_in_flight == 4096


async def test_a_watcher_gets_the_whole_list_first_and_then_each_change(connect: Connect) -> None:
    plugin = await connect("plugin", tool("a"), tool("b"))
    watcher = await connect("watcher", subscribe=[WATCH])
    await until(lambda: _changes(watcher), "the first list")
    first = _changes(watcher)[0]
    assert first.full
    assert _names(first.added) == ["a", "b"]
    assert {item.source for item in first.added} == {"plugin"}

    assert plugin.attached is not None
    session_id = plugin.attached.session_id
    await plugin.stub.Register(wire.RegisterRequest(session_id=session_id, tools=[tool("c")]))
    await until(lambda: len(_changes(watcher)) == 2, "what was added")
    assert _names(_changes(watcher)[1].added) == ["c"]

    await plugin.stub.Register(wire.RegisterRequest(session_id=session_id, tools=[tool("c", description="new")]))
    await until(lambda: len(_changes(watcher)) == 3, "what was changed")
    assert _names(_changes(watcher)[2].changed) == ["c"]

    await plugin.stub.Unregister(wire.UnregisterRequest(name="c"))
    await until(lambda: len(_changes(watcher)) == 4, "what was removed")
    assert [(ref.name, ref.source) for ref in _changes(watcher)[3].removed] == [("c", "plugin")]

    await plugin.close()
    await until(lambda: len(_changes(watcher)) == 5, "what was lost")
    assert {ref.name for ref in _changes(watcher)[4].removed} == {"a", "b"}
    revisions = [change.revision for change in _changes(watcher)]
    assert revisions == sorted(set(revisions))
    assert not any(change.full for change in _changes(watcher)[1:])


async def test_a_session_that_does_not_watch_gets_no_catalog_events(connect: Connect) -> None:
    quiet = await connect("quiet")
    watcher = await connect("watcher", subscribe=[WATCH])
    await connect("plugin", tool("a"))
    await until(lambda: len(_changes(watcher)) == 2, "what was added")
    await quiet.call("nothing")
    assert not quiet.events


async def test_an_owner_is_notified_that_another_caller_withdrew_its_tools(connect: Connect) -> None:
    owner = await connect("owner", tool("a"), tool("b"), tool("c"))
    other = await connect("other")
    await other.stub.Unregister(wire.UnregisterRequest(name="a"))
    cleared = await other.stub.Clear(wire.ClearRequest(source="owner"))
    assert cleared.removed == 2
    await until(lambda: len(owner.events) == 3, "three events")
    assert [event.tool_removed.name for event in owner.events] == ["a", "b", "c"]
    assert list(owner.events[0].tool_removed.roles) == ["default"]


async def test_an_owner_that_withdraws_its_own_tool_is_not_notified(connect: Connect) -> None:
    owner = await connect("owner", tool("a"))
    assert owner.attached is not None
    response = await owner.stub.Unregister(wire.UnregisterRequest(session_id=owner.attached.session_id, name="a"))
    assert (response.removed, list(response.affected_roles)) == (True, ["default"])
    assert (await owner.call("a")).error.code == pb.ERROR_CODE_NOT_FOUND
    assert not owner.events


async def test_a_long_list_comes_in_pages_that_a_default_client_can_receive(connect: Connect) -> None:
    text = "x" * 16_000
    plugin = await connect("plugin", *(tool(f"t{n:04}", description=text) for n in range(500)))
    names: list[str] = []
    token, pages = "", 0
    while True:
        page = await plugin.stub.List(wire.ListRequest(page_token=token))
        names += _names(page.tools)
        pages += 1
        token = page.next_page_token
        if not token:
            break
        assert page.ByteSize() < 4 * 1024 * 1024
    assert pages == 3
    assert names == [f"t{n:04}" for n in range(500)]


async def test_a_watcher_gets_a_long_list_in_frames_that_it_can_receive(connect: Connect) -> None:
    text = "x" * 16_000
    await connect("plugin", *(tool(f"t{n:04}", description=text) for n in range(500)))
    watcher = await connect("watcher", subscribe=[WATCH])
    await until(lambda: sum(len(change.added) for change in _changes(watcher)) == 500, "the whole list")
    assert max(frame.ByteSize() for frame in watcher.frames) < 2 * 1024 * 1024


async def test_an_invalid_page_token_is_refused(connect: Connect) -> None:
    peer = await connect("peer")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await peer.stub.List(wire.ListRequest(page_token="x" * 1_000))
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_list_that_has_not_changed_is_empty(connect: Connect) -> None:
    peer = await connect("peer", tool("a"))
    first = await peer.stub.List(wire.ListRequest())
    again = await peer.stub.List(wire.ListRequest(if_revision=first.revision))
    assert (again.revision, len(again.tools)) == (first.revision, 0)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services_and_describes_each(stranger: RawPeer, version: str) -> None:
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    ask = stranger.channel.stream_stream(
        path,
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    (services,) = [answer async for answer in ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))]
    names = {service.name for service in services.list_services_response.service}
    assert names == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "toolbus.v1.ToolBusService",
    }
    requests = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in sorted(names)]
    requests.append(reflection_pb2.ServerReflectionRequest(file_by_filename="grpc/reflection/v1/reflection.proto"))
    described = [answer async for answer in ask(iter(requests))]
    texts = [each for answer in described for each in answer.file_descriptor_response.file_descriptor_proto]
    files = {(file := descriptor_pb2.FileDescriptorProto.FromString(each)).name: file for each in texts}
    assert {f"{file.package}.{each.name}" for file in files.values() for each in file.service} == names
    types = {f".{file.package}.{each.name}" for file in files.values() for each in file.message_type}
    methods = [each for file in files.values() for service in file.service for each in service.method]
    assert {each.input_type for each in methods if "reflection" in each.input_type} <= types


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_unary", "toolbus.v1.ToolBusService/List"),
        ("unary_stream", "grpc.health.v1.Health/Watch"),
        ("stream_stream", "toolbus.v1.ToolBusService/Invoke"),
        ("stream_stream", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
        ("stream_stream", "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
    ],
)
async def test_bytes_that_are_not_protobuf_end_an_rpc_with_a_reason_and_no_traceback(
    stranger: RawPeer, caplog: pytest.LogCaptureFixture, kind: str, method: str
) -> None:
    make = getattr(stranger.channel, kind)(f"/{method}")  # without serializers: bytes as they are
    garbage = b"\xff\xff\xff"
    call = make(iter([garbage])) if kind == "stream_stream" else make(garbage)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "decoded" in await call.details()
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_program_in_the_process_and_a_peer_see_the_same_tools(bus: Bus, connect: Connect) -> None:
    @bus.tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    peer = await connect("peer", tool("theirs"), answer=echo)
    assert (await peer.call("add", {"a": 1, "b": 2})).output_json == "3"
    assert (await bus.call("theirs", {"n": 1})).output == {"n": 1}
    assert _names((await peer.stub.List(wire.ListRequest())).tools) == ["add", "theirs"]


async def test_a_peer_that_pings_every_second_keeps_its_connection(bus: Bus) -> None:
    """The SDK pings every 2 s where grpc may overlook a reset connection; too many pings end a connection."""
    options = (("grpc.keepalive_time_ms", 1_050), ("grpc.http2.max_pings_without_data", 0))
    async with grpc.aio.insecure_channel(bus.grpc_addresses[0], options=options) as channel:
        stub: Any = ToolBusServiceStub(channel)
        call = stub.Invoke()
        await call.write(wire.InvokeRequest(attach=wire.Attach(source="pinger", protocol_version=1)))

        async def read() -> None:
            async for _ in call:
                pass

        done, _ = await asyncio.wait([reading := asyncio.ensure_future(read())], timeout=5.5)
        assert not done
        reading.cancel()


async def test_a_connection_that_pings_more_often_than_every_second_is_told_so_and_ended(bus: Bus) -> None:
    """grpcio's own client never does; what others do then is a scenario of the conformance rules."""
    host, _, port = bus.grpc_addresses[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    settings, ping = bytes.fromhex("000000040000000000"), bytes.fromhex("000008060000000000") + b"12345678"
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + 10 * ping)
    answer = b""
    async with asyncio.timeout(WAIT_SECONDS):
        with contextlib.suppress(ConnectionResetError):
            while received := await reader.read(1_000):
                answer += received
    assert bytes.fromhex("0000000b") + b"too_many_pings" in answer  # ENHANCE_YOUR_CALM
    writer.close()


@pytest.mark.parametrize("kind", [*OTHERS, "lock", "lock link"])
async def test_nothing_of_others_makes_room_for_a_socket(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "own" / "bus.sock"
    path.parent.mkdir(mode=0o700)
    with somebody_elses(kind, path) as untouched:
        with pytest.raises(SetupError, match=r"left as it is|cannot be opened"):
            async with running_bus(grpc=(f"unix:{path}",)):
                pass
        assert untouched()


async def test_the_socket_of_a_program_that_has_ended_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "own" / "bus.sock"
    path.parent.mkdir(mode=0o700)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as dead:
            path.unlink(missing_ok=True)
            dead.bind(str(path))
        async with running_bus(grpc=(f"unix:{path}",)) as bus, Host(bus.grpc_addresses[0]) as host:
            assert not list(await host.list())
