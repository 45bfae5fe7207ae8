"""Tests how a stream may begin, and how the bus ends one that begins otherwise."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.faults.conftest import Connect
from tests.faults.raw_peer import RawPeer, attach, echo, opening, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

pytestmark = pytest.mark.usefixtures("bystander")

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "frame",
    [
        wire.InvokeRequest(),
        wire.InvokeRequest(calls=[pb.ToolCall(call_id="1", name="steady")]),
        wire.InvokeRequest(results=[pb.ToolResult(call_id="1")]),
        wire.InvokeRequest(drain=wire.Drain(reason="bye")),
        wire.InvokeRequest(heartbeat=wire.Heartbeat(sequence=1)),
    ],
    ids=["empty", "calls", "results", "drain", "heartbeat"],
)
async def test_a_first_message_without_attach_ends_the_stream_with_an_error(
    stranger: RawPeer, frame: wire.InvokeRequest
) -> None:
    code, details = await stranger.refused(frame)
    assert code is INVALID
    assert "first message" in details
    assert "attach" in details


async def test_a_stream_that_ends_before_its_first_message_is_told_to_attach_first(stranger: RawPeer) -> None:
    stranger.open()
    await stranger.half_close()
    code, details = await stranger.ended()
    assert code is INVALID
    assert "attach" in details


async def test_a_second_attach_under_another_source_ends_the_stream_and_its_calls(connect: Connect) -> None:
    plugin = await connect("first", tool("mine"))
    host = await connect("host")
    (future,) = await host.start(host.ask("mine"))
    await plugin.received()
    await plugin.send(attach=attach("second", tool("mine")))
    code, details = await plugin.ended()
    assert code is INVALID
    assert "'first'" in details
    assert "'second'" in details
    result = await asyncio.wait_for(future, WAIT_SECONDS)
    assert (result.error.code, result.error.stage) == (pb.ERROR_CODE_UNAVAILABLE, pb.CALL_STAGE_DISPATCHED)


async def test_a_later_attach_that_is_all_or_none_and_refused_leaves_everything_as_it_was(connect: Connect) -> None:
    plugin = await connect("again", tool("old"), answer=echo)
    plugin.attached = None
    await plugin.send(attach=attach("again", tool("new"), tool("bad name"), all_or_none=True))
    await until(lambda: plugin.attached, "the answer to the later attach")
    answer = plugin.frames[-1].attached
    assert {refused.name for refused in answer.refused} == {"new", "bad name"}
    assert "bad name" in answer.refused[0].error
    assert list(answer.registered) == ["old"]
    host = await connect("host")
    assert (await host.call("old", {"a": 1})).output_json == '{"a": 1}'
    assert (await host.call("new")).error.code == pb.ERROR_CODE_NOT_FOUND


@pytest.mark.parametrize("version", [0, 2, 4_000_000_000])
async def test_another_protocol_version_ends_in_an_error_that_says_what_to_do(stranger: RawPeer, version: int) -> None:
    code, details = await stranger.refused(opening("future", protocol_version=version))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "speaks version 1" in details
    assert f"version {version}" in details
    assert "pdate" in details


@pytest.mark.parametrize("source", ["", "x" * 129, "has space", "ümlaut", "new\nline", "a/b", "x" * 5_000_000])
async def test_a_source_that_breaks_the_rule_is_refused_with_the_rule(stranger: RawPeer, source: str) -> None:
    code, details = await stranger.refused(opening(source))
    assert code is INVALID
    assert "[A-Za-z0-9_.:-]{1,128}" in details
    assert len(details) < 500


async def test_an_instance_that_is_too_long_is_refused_with_the_limit(stranger: RawPeer) -> None:
    code, details = await stranger.refused(opening("ok", instance="i" * 129))
    assert code is INVALID
    assert "at most 128" in details


@pytest.mark.parametrize("name", ["", "x" * 65, "has space", "söurce", "a:b", "a/b", "a\x00b", "x" * 1_000_000])
async def test_a_tool_name_that_breaks_the_rule_is_refused_and_the_other_tool_is_offered(
    stranger: RawPeer, connect: Connect, name: str
) -> None:
    attached = await stranger.attach("names", tool("good"), tool(name))
    (refused,) = attached.refused
    assert "[A-Za-z0-9_.-]{1,64}" in refused.error
    assert len(refused.SerializeToString()) < 1_000
    assert list(attached.registered) == ["good"]
    assert stranger.code is None


async def test_the_bus_keeps_its_own_source_to_itself(stranger: RawPeer) -> None:
    code, details = await stranger.refused(opening("toolbus"))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "choose another" in details


async def test_a_role_that_is_not_configured_refuses_an_attach_that_is_all_or_none(stranger: RawPeer) -> None:
    code, details = await stranger.refused(opening("roles", tool("t", role="nobody"), all_or_none=True))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "nobody" in details


async def test_a_newer_session_of_an_instance_replaces_the_older_one(connect: Connect) -> None:
    older = await connect("twin", tool("work"), instance="one")
    host = await connect("host")
    (future,) = await host.start(host.ask("work"))
    await older.received()
    newer = await connect("twin", tool("work"), instance="one", answer=echo)
    code, _ = await older.ended()
    assert code is grpc.StatusCode.OK
    assert [drain.reason for drain in older.drains] == ["replaced"]
    result = await asyncio.wait_for(future, WAIT_SECONDS)
    assert (result.error.code, result.error.retry_safe) == (pb.ERROR_CODE_UNAVAILABLE, False)
    assert (await host.call("work", {"n": 1})).output_json == '{"n": 1}'
    assert len(newer.calls) == 1


async def test_a_newer_session_gets_attached_before_the_calls_it_takes_over(connect: Connect) -> None:
    repeatable = tool("again", annotations=pb.ToolAnnotations(idempotent=True))
    older = await connect("heir", repeatable, instance="one")
    other = await connect("heir", repeatable, instance="two", max_in_flight=1)
    host = await connect("host")
    futures = await host.start(host.ask("again", {"n": 1}), host.ask("again", {"n": 2}))
    await older.received()
    await other.received()
    newer = await connect("heir", repeatable, instance="one", answer=echo)
    moved = futures[0] if older.calls[0].arguments_json == '{"n": 1}' else futures[1]
    assert (await asyncio.wait_for(moved, WAIT_SECONDS)).output_json == older.calls[0].arguments_json
    assert newer.frames[0].HasField("attached")


async def test_a_bad_attach_of_the_same_instance_leaves_the_older_session_alone(
    stranger: RawPeer, connect: Connect
) -> None:
    await connect("careful", tool("work"), instance="one", answer=echo)
    tools = (tool("work"), tool("x", role="nobody"))
    code, _ = await stranger.refused(opening("careful", *tools, instance="one", all_or_none=True))
    assert code is grpc.StatusCode.NOT_FOUND
    host = await connect("host")
    assert (await host.call("work", {"n": 1})).output_json == '{"n": 1}'


async def test_two_processes_under_one_instance_name_are_refused_after_five_takeovers(
    connect: Connect, stranger: RawPeer
) -> None:
    newest = await connect("clone", tool("work"), instance="same", answer=echo)
    for _ in range(5):
        newest = await connect("clone", tool("work"), instance="same", answer=echo)
    code, details = await stranger.refused(opening("clone", tool("work"), instance="same"))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "give each its own" in details
    host = await connect("host")
    assert (await host.call("work", {"n": 1})).output_json == '{"n": 1}'
    assert len(newest.calls) == 1


async def test_sessions_without_an_instance_share_the_calls(connect: Connect) -> None:
    pair = [await connect("pair", tool("shared")) for _ in range(2)]
    host = await connect("host")
    await host.start(*(host.ask("shared") for _ in range(10)))
    await until(lambda: sum(len(peer.calls) for peer in pair) == 10, "ten calls")
    assert [len(peer.calls) for peer in pair] == [5, 5]


async def test_thousands_of_tools_come_in_one_attach_and_in_registers(bus: Bus, connect: Connect) -> None:
    plugin = await connect("many", *(tool(f"a{n}") for n in range(4_000)), answer=echo)
    assert plugin.attached is not None
    for start in range(0, 4_000, 1_000):
        tools = [tool(f"b{n}") for n in range(start, start + 1_000)]
        response = await plugin.stub.Register(wire.RegisterRequest(session_id=plugin.attached.session_id, tools=tools))
        assert response.ok
    assert len([listing for listing in bus.list() if listing.source == "many"]) == 8_000
    host = await connect("host")
    assert (await host.call("b3999", {"n": 1})).output_json == '{"n": 1}'
    await plugin.close()
    await until(lambda: not [item for item in bus.list(include_offline=True) if item.source == "many"], "them to go")
