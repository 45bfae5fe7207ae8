"""Calls that call, and what the end of a session ends: each call in exactly one result, whoever goes away."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.faults.conftest import Connect
from tests.faults.raw_peer import RawPeer, attach, echo, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

pytestmark = pytest.mark.usefixtures("bystander")


async def one_result(future: asyncio.Future[pb.ToolResult]) -> pb.ToolResult:
    return await asyncio.wait_for(future, WAIT_SECONDS)


async def listed(peer: RawPeer, name: str) -> wire.ListedTool:
    response: wire.ListResponse = await peer.stub.List(wire.ListRequest(names=[name], include_offline=True))
    return response.tools[0]


# -- nested calls ------------------------------------------------------------------------------------------------------


async def test_a_calling_b_calling_a_with_one_slot_is_refused_at_once(connect: Connect) -> None:
    a = await connect("a", tool("a"), max_in_flight=1)
    b = await connect("b", tool("b"), max_in_flight=1)
    host = await connect("host")
    (future,) = await host.start(host.ask("a"))
    (at_a,) = await a.received()
    (from_b,) = await a.start(a.ask("b", parent_call_id=at_a.call_id))
    (at_b,) = await b.received()
    refused = await b.call("a", parent_call_id=at_b.call_id)
    assert (refused.error.code, refused.error.stage) == (pb.ERROR_CODE_OVERLOADED, pb.CALL_STAGE_NOT_DISPATCHED)
    await b.send(results=[pb.ToolResult(call_id=at_b.call_id, output_json='"b gave up"')])
    assert (await one_result(from_b)).output_json == '"b gave up"'
    await a.send(results=[pb.ToolResult(call_id=at_a.call_id, output_json='"a answers"')])
    assert (await one_result(future)).output_json == '"a answers"'


async def test_a_chain_of_more_than_8_calls_ends_in_an_error_that_says_so(connect: Connect) -> None:
    plugin = await connect("chain", tool("next"))
    host = await connect("host")
    (outermost,) = await host.start(host.ask("next"))
    for depth in range(1, 8):
        calls = await plugin.received(depth)
        await plugin.start(plugin.ask("next", parent_call_id=calls[-1].call_id))
    calls = await plugin.received(8)
    refused = await plugin.call("next", parent_call_id=calls[-1].call_id)
    assert refused.error.code == pb.ERROR_CODE_PERMISSION_DENIED
    assert (refused.error.limit.name, refused.error.limit.value) == ("call_depth", 8)
    await plugin.send(results=[echo(call) for call in reversed(calls)])
    assert not (await one_result(outermost)).is_error


async def test_a_nested_call_is_cancelled_with_its_parent(connect: Connect) -> None:
    plugin, inner = await connect("outer", tool("outer")), await connect("inner", tool("inner"))
    host = await connect("host")
    (future,) = await host.start(host.ask("outer"))
    (call,) = await plugin.received()
    (nested,) = await plugin.start(plugin.ask("inner", parent_call_id=call.call_id))
    (at_inner,) = await inner.received()
    await host.send(cancels=[pb.ToolCancel(call_id="c1")])
    assert (await one_result(future)).error.code == pb.ERROR_CODE_CANCELLED
    assert (await one_result(nested)).error.code == pb.ERROR_CODE_CANCELLED
    await until(lambda: inner.cancels, "the cancel")
    assert inner.cancels[0].call_id == at_inner.call_id


async def test_a_parent_that_is_not_a_pending_call_of_the_session_is_refused(connect: Connect) -> None:
    plugin, other = await connect("plugin", tool("t")), await connect("other", tool("u"))
    host = await connect("host")
    await host.start(host.ask("t"))
    (call,) = await plugin.received()
    for peer, parent in ((other, call.call_id), (plugin, "nonsense")):
        refused = await peer.call("u", parent_call_id=parent)
        assert refused.error.code == pb.ERROR_CODE_INVALID_ARGUMENTS
        assert "not a call that this session runs" in refused.error.message


async def test_context_comes_from_hosts_only_and_follows_nested_calls(connect: Connect) -> None:
    plugin, inner = await connect("outer", tool("outer")), await connect("inner", tool("inner"))
    host = await connect("host")
    await host.start(host.ask("outer", context=pb.CallContext(user_id="ada")))
    (call,) = await plugin.received()
    assert call.context.user_id == "ada"
    forged = pb.CallContext(user_id="eve")
    await plugin.start(
        plugin.ask("inner", context=forged, parent_call_id=call.call_id), plugin.ask("inner", context=forged)
    )
    calls = await inner.received(2)
    assert [call.context.user_id for call in calls] == ["ada", ""]


# -- what the end of a session ends ------------------------------------------------------------------------------------


async def test_when_a_caller_disconnects_its_calls_are_cancelled_at_the_plugin(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    await host.start(*(host.ask("t") for _ in range(3)))
    calls = await plugin.received(3)
    await host.close()
    await until(lambda: len(plugin.cancels) == 3, "three cancels")
    assert {cancel.call_id for cancel in plugin.cancels} == {call.call_id for call in calls}
    assert {cancel.reason for cancel in plugin.cancels} == {"caller gone"}


async def test_when_a_plugin_disconnects_each_of_its_calls_ends_once_and_at_once(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    futures = await host.start(*(host.ask("t") for _ in range(20)))
    calls = await plugin.received(20)
    await plugin.send(progress=[pb.ToolProgress(call_id=calls[0].call_id)])
    await until(lambda: host.progress, "the progress")
    await plugin.close()
    results = [await one_result(future) for future in futures]
    assert {result.error.code for result in results} == {pb.ERROR_CODE_UNAVAILABLE}
    assert Counter(result.error.stage for result in results) == {
        pb.CALL_STAGE_ACCEPTED: 1, pb.CALL_STAGE_DISPATCHED: 19,
    }  # fmt: skip
    assert not any(result.error.retry_safe for result in results)
    offline = await host.call("t")
    assert (offline.error.code, offline.error.stage) == (pb.ERROR_CODE_UNAVAILABLE, pb.CALL_STAGE_NOT_DISPATCHED)
    assert offline.error.retry_safe
    assert len(host.results) == 21


async def test_calls_of_an_idempotent_tool_are_retried_by_another_session(connect: Connect) -> None:
    safe = tool("t", annotations=pb.ToolAnnotations(idempotent=True))
    first, second = await connect("pair", safe), await connect("pair", safe)
    host = await connect("host")
    futures = await host.start(*(host.ask("t", {"n": n}) for n in range(10)))
    await first.received(5)
    second.answer = echo
    await second.received(5)
    await second.send(results=[echo(call) for call in second.calls])
    await first.close()
    assert [(await one_result(future)).output_json for future in futures] == [f'{{"n": {n}}}' for n in range(10)]
    assert len(host.results) == 10


async def test_tools_of_a_plugin_that_reconnects_in_time_keep_their_place(bus: Bus, connect: Connect) -> None:
    plugin = await connect("plugin", tool("a"), instance="one")
    await connect("other", tool("b"))
    host = await connect("host")
    await plugin.close()
    await until(lambda: "a" not in [item.tool.name for item in bus.list()], "the tool to go offline")
    line = await listed(host, "a")
    assert (line.session_state, bool(line.last_error)) == (wire.SESSION_STATE_OFFLINE, True)
    await connect("plugin", tool("a"), instance="one", answer=echo)
    assert [item.tool.name for item in bus.list()] == ["steady", "a", "b"]
    assert (await host.call("a", {"n": 1})).output_json == '{"n": 1}'


async def test_a_peer_may_declare_its_tools_again_while_calls_run(connect: Connect) -> None:
    plugin = await connect("plugin", tool("old"))
    host = await connect("host")
    (future,) = await host.start(host.ask("old", {"n": 1}))
    (call,) = await plugin.received()
    plugin.attached = None
    await plugin.send(attach=attach("plugin", tool("new")))
    await until(lambda: plugin.attached, "the answer")
    await plugin.send(results=[echo(call)])
    assert (await one_result(future)).output_json == '{"n": 1}'
    assert (await host.call("old")).error.code == pb.ERROR_CODE_NOT_FOUND


async def test_the_owner_is_notified_of_a_tool_overwritten_by_another_source(connect: Connect) -> None:
    owner = await connect("owner", tool("t"))
    await connect("taker", tool("t"), answer=echo)
    await until(lambda: owner.events, "the event")
    lost = owner.events[0].tool_overwritten
    assert (lost.name, lost.by_source, list(lost.roles)) == ("t", "taker", ["default"])
    host = await connect("host")
    assert (await host.call("t", {"n": 1})).output_json == '{"n": 1}'
