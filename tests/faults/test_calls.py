"""Calls that go wrong: each ends in exactly one result that says why, and every slot comes back."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest

from tests.faults.conftest import Connect
from tests.faults.raw_peer import RawPeer, attach, echo, tool
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus
from toolbus.protocol.limits import Timings
from toolbus.protocol.session import DEFAULT_MESSAGE_BYTES, ITEM_OVERHEAD_BYTES
from toolbus.protocol.tool import MIB, Limits
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

pytestmark = pytest.mark.usefixtures("bystander")


def big(call: pb.ToolCall) -> pb.ToolResult:
    """Answers as many characters as the call asks for; small calls are echoed."""
    size = int(call.arguments_json.partition(": ")[2].rstrip("}") or 0)
    return pb.ToolResult(call_id=call.call_id, output_json=f'"{"x" * (size - 2)}"') if size > 100 else echo(call)


async def one_result(future: asyncio.Future[pb.ToolResult]) -> pb.ToolResult:
    return await asyncio.wait_for(future, WAIT_SECONDS)


async def listed(peer: RawPeer, name: str) -> wire.ListedTool:
    response: wire.ListResponse = await peer.stub.List(wire.ListRequest(names=[name], include_offline=True))
    return response.tools[0]


# -- results -----------------------------------------------------------------------------------------------------------


async def test_a_result_over_the_limit_is_replaced_and_other_calls_go_on(connect: Connect) -> None:
    await connect("plugin", tool("big"), answer=big)
    host = await connect("host")
    calls = [host.ask("big", {"n": size}) for size in (1, 5 * MIB, 2, 4 * MIB, 3)]
    results = [await one_result(future) for future in await host.start(*calls)]
    assert [result.error.code for result in results] == [0, 10, 0, 10, 0]
    assert results[1].error.limit.name == "result_bytes"
    assert results[1].error.limit.value == Limits().result_bytes
    assert not results[1].error.retry_safe
    assert [result.output_json for result in results[::2]] == ['{"n": 1}', '{"n": 2}', '{"n": 3}']
    assert host.code is None


async def test_a_result_of_just_the_limit_reaches_a_default_client(connect: Connect) -> None:
    await connect("plugin", tool("big"), answer=big)
    host = await connect("host")
    size = DEFAULT_MESSAGE_BYTES - ITEM_OVERHEAD_BYTES
    assert size > 0.99 * Limits().result_bytes
    assert len((await host.call("big", {"n": size})).output_json) == size
    error = (await host.call("big", {"n": size + 1})).error
    assert (error.code, error.limit.name, error.limit.value) == (10, "max_message_bytes", size)


async def test_a_result_over_what_the_caller_can_receive_is_replaced(connect: Connect) -> None:
    await connect("plugin", tool("big"), answer=big)
    host = await connect("host", max_message_bytes=200_000)
    result = await host.call("big", {"n": 200_000})
    assert result.error.code == pb.ERROR_CODE_RESULT_TOO_LARGE
    assert result.error.limit.name == "max_message_bytes"


async def test_no_frame_is_larger_than_its_peer_takes_whatever_the_alphabet(connect: Connect) -> None:
    await connect("plugin", tool("t"), answer=echo)
    host = await connect("host", max_message_bytes=200_000)
    futures = await host.start(*(host.ask("t", f'{{"s": "{"𝄞" * 20_000}"}}') for _ in range(10)))
    for future in futures:
        assert len((await one_result(future)).output_json) == 20_009
    assert max(frame.ByteSize() for frame in host.frames) <= 200_000


async def test_progress_over_what_the_caller_can_receive_ends_that_call_alone(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    futures = await host.start(host.ask("t"), host.ask("t", {"n": 1}))
    first, second = await plugin.received(2)
    chunk = pb.ToolProgress(call_id=first.call_id, output_chunk="x" * (5 * MIB))
    await plugin.send(progress=[chunk], results=[echo(second)])
    result = await one_result(futures[0])
    assert (result.error.code, result.error.limit.name) == (pb.ERROR_CODE_RESULT_TOO_LARGE, "result_bytes")
    assert (await one_result(futures[1])).output_json == '{"n": 1}'
    await until(lambda: plugin.cancels, "the cancel")


async def test_a_context_over_the_limit_is_refused_before_it_reaches_the_plugin(connect: Connect) -> None:
    await connect("plugin", tool("t"), answer=echo)
    host = await connect("host")
    long = pb.CallContext(messages=[pb.ContextMessage(role="user", content="x" * (5 * MIB))])
    result = await host.call("t", context=long)
    assert (result.error.code, result.error.stage) == (pb.ERROR_CODE_INVALID_ARGUMENTS, pb.CALL_STAGE_NOT_DISPATCHED)
    assert "context" in result.error.message
    assert not (await host.call("t")).is_error


async def test_contexts_count_towards_the_size_of_a_frame(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"), answer=echo)
    host = await connect("host")
    context = pb.CallContext(messages=[pb.ContextMessage(role="user", content="x" * 500_000)])
    for future in await host.start(*(host.ask("t", context=context) for _ in range(20))):
        assert not (await one_result(future)).is_error
    assert max(frame.ByteSize() for frame in plugin.frames) < 2 * MIB


async def test_results_and_progress_of_unknown_calls_are_dropped_and_counted(bus: Bus, connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    before = bus.records.unexpected
    await plugin.send(
        results=[pb.ToolResult(call_id=call_id) for call_id in ("", "1", "no such", "x" * 100_000)],
        progress=[pb.ToolProgress(call_id="no such")],
        cancels=[pb.ToolCancel(call_id="no such")],
    )
    await host.send(results=[pb.ToolResult(call_id="1")], progress=[pb.ToolProgress(call_id="1")])
    await until(lambda: bus.records.unexpected == before + 7, "seven to be counted")
    (future,) = await host.start(host.ask("t", {"n": 1}))
    (call,) = await plugin.received()
    await plugin.send(results=[echo(call), echo(call)])
    assert (await one_result(future)).output_json == '{"n": 1}'
    await until(lambda: bus.records.unexpected == before + 8, "the second answer to be counted")
    assert len(host.results) == 1


async def test_a_plugin_cannot_answer_the_calls_of_another(connect: Connect) -> None:
    owner, thief = await connect("owner", tool("t")), await connect("thief", tool("u"))
    host = await connect("host")
    (future,) = await host.start(host.ask("t", {"n": 1}))
    (call,) = await owner.received()
    await thief.send(results=[pb.ToolResult(call_id=call.call_id, output_json='"stolen"')])
    await owner.send(results=[echo(call)])
    assert (await one_result(future)).output_json == '{"n": 1}'


async def test_the_same_call_id_twice_in_flight_is_refused_and_the_first_goes_on(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    await host.send(calls=[host.ask("t", {"n": 1}, call_id="same"), host.ask("t", {"n": 2}, call_id="same")])
    await until(lambda: host.results, "the refusal")
    assert host.results[0].error.code == pb.ERROR_CODE_INVALID_ARGUMENTS
    assert "already in flight" in host.results[0].error.message
    (call,) = await plugin.received()
    await plugin.send(results=[echo(call)])
    await until(lambda: len(host.results) == 2, "the first call's result")
    assert host.results[1].output_json == '{"n": 1}'


async def test_two_sessions_may_use_the_same_call_id(connect: Connect) -> None:
    await connect("plugin", tool("t"), answer=echo)
    hosts = [await connect("host") for _ in range(2)]
    results = await asyncio.gather(*(host.call("t", {"n": n}, call_id="same") for n, host in enumerate(hosts)))
    assert [result.output_json for result in results] == ['{"n": 0}', '{"n": 1}']


# -- cancels and time-outs ---------------------------------------------------------------------------------------------


async def test_a_cancel_ends_the_call_at_once_and_reaches_the_plugin(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    (future,) = await host.start(host.ask("t"))
    (call,) = await plugin.received()
    await host.send(cancels=[pb.ToolCancel(call_id="c1", reason="enough")])
    result = await one_result(future)
    assert (result.error.code, result.error.stage) == (pb.ERROR_CODE_CANCELLED, pb.CALL_STAGE_DISPATCHED)
    await until(lambda: plugin.cancels, "the cancel")
    assert (plugin.cancels[0].call_id, plugin.cancels[0].reason) == (call.call_id, "enough")
    assert (await listed(host, "t")).stuck == 1
    await plugin.send(results=[pb.ToolResult(call_id=call.call_id)])
    await until_not_stuck(host, "t")
    assert len(host.results) == 1


async def until_not_stuck(peer: RawPeer, name: str) -> None:
    for _ in range(500):
        if not (await listed(peer, name)).stuck:
            return
    pytest.fail("the slot is still stuck")


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"timeout_seconds": 0.05}, "timeout_seconds"), ({"idle_timeout_seconds": 0.05}, "idle_timeout_seconds")],
    ids=["timeout", "idle timeout"],
)
async def test_a_call_past_its_deadline_ends_and_the_plugin_gets_a_cancel(
    bus: Bus, connect: Connect, fields: dict[str, float], limit: str
) -> None:
    plugin = await connect("plugin", tool("t", **fields))
    host = await connect("host")
    result = await host.call("t")
    assert result.error.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
    assert (result.error.limit.name, result.error.limit.value) == (limit, 0.05)
    await until(lambda: plugin.cancels, "the cancel")
    assert plugin.cancels[0].reason == limit
    late = bus.records.late
    await plugin.send(results=[echo(plugin.calls[0])])
    await until(lambda: bus.records.late == late + 1, "the late result to be counted")
    assert len(host.results) == 1


async def test_progress_makes_a_call_accepted_and_resets_its_idle_timeout(connect: Connect) -> None:
    plugin = await connect("plugin", tool("t", idle_timeout_seconds=2.0))
    host = await connect("host")
    (future,) = await host.start(host.ask("t"))
    (call,) = await plugin.received()
    for _ in range(6):
        host.progress.clear()
        await plugin.send(progress=[pb.ToolProgress(call_id=call.call_id)])
        await until(lambda: host.progress, "the progress")
        await asyncio.wait([future], timeout=0.4)  # six of them are longer than the idle timeout
    assert not future.done()
    result = await one_result(future)
    assert (result.error.code, result.error.stage) == (pb.ERROR_CODE_DEADLINE_EXCEEDED, pb.CALL_STAGE_ACCEPTED)


@pytest.mark.parametrize("timings", [Timings(stuck_seconds=0.5)])
async def test_a_plugin_that_ignores_cancels_keeps_its_slot_stuck_until_it_is_freed(connect: Connect) -> None:
    plugin = await connect("deaf", tool("t"), max_in_flight=1)
    host = await connect("host")
    assert (await host.call("t", timeout_seconds=0.05)).error.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
    line = await listed(host, "t")
    assert (line.in_flight, line.stuck) == (0, 1)
    refused = await host.call("t")
    assert (refused.error.code, refused.error.stage) == (pb.ERROR_CODE_OVERLOADED, pb.CALL_STAGE_NOT_DISPATCHED)
    await asyncio.wait_for(_until_not_stuck_slowly(host), WAIT_SECONDS)
    plugin.answer = echo
    assert (await host.call("t", {"n": 1})).output_json == '{"n": 1}'


async def _until_not_stuck_slowly(peer: RawPeer) -> None:
    while (await listed(peer, "t")).stuck:
        await asyncio.sleep(0.02)


async def test_calls_of_a_full_plugin_are_refused_at_once_with_a_retry_hint(connect: Connect) -> None:
    plugin = await connect("small", tool("t"), max_in_flight=2)
    host = await connect("host")
    futures = await host.start(*(host.ask("t") for _ in range(5)))
    await until(lambda: len(host.results) == 3, "the refusals")
    for result in host.results:
        error = result.error
        assert (error.code, error.retry_safe) == (pb.ERROR_CODE_OVERLOADED, True)
        assert error.retry_after_seconds > 0
        assert error.limit.name == "calls_in_flight"
    await plugin.send(results=[echo(call) for call in await plugin.received(2)])
    codes = [(await one_result(future)).error.code for future in futures]
    assert Counter(codes) == {0: 2, pb.ERROR_CODE_OVERLOADED: 3}


async def test_a_caller_with_too_many_calls_in_flight_is_refused(connect: Connect) -> None:
    await connect("plugin", tool("t"))
    host = await connect("host", max_in_flight=3)
    await host.start(*(host.ask("t") for _ in range(5)))
    await until(lambda: len(host.results) == 2, "the refusals")
    assert {result.error.code for result in host.results} == {pb.ERROR_CODE_OVERLOADED}
    assert "'host' has 3 calls in flight" in host.results[0].error.message


# -- what the bus holds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [Limits(held_bytes=2_000_000, held_bytes_per_source=1_000_000)])
async def test_calls_of_a_source_above_the_limit_of_held_bytes_are_refused(connect: Connect, limits: Limits) -> None:
    plugin = await connect("plugin", tool("t"))
    host = await connect("host")
    await host.start(*(host.ask("t", {"s": "x" * 300_000}) for _ in range(5)))
    await until(lambda: len(host.results) == 2, "the refusals")
    assert {result.error.limit.name for result in host.results} == {"held_bytes_per_source"}
    await plugin.send(results=[pb.ToolResult(call_id=call.call_id) for call in await plugin.received(3)])
    await until(lambda: len(host.results) == 5, "the answers")
    plugin.answer = echo
    assert not (await host.call("t", {"s": "x" * 300_000})).is_error


@pytest.mark.parametrize("limits", [Limits(sessions=4)])
async def test_a_bus_with_all_its_sessions_refuses_the_next_by_name_of_the_limit(
    connect: Connect, stranger: RawPeer, limits: Limits
) -> None:
    peers = [await connect("peer") for _ in range(2)]  # two more are the bystander's
    code, details = await stranger.refused(wire.InvokeRequest(attach=attach("late")))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "limit sessions = 4" in details
    await peers[0].close()
    await until_attached(stranger)


async def until_attached(peer: RawPeer) -> None:
    """Attaches as soon as the bus lets the peer in."""
    for _ in range(200):
        peer.open()
        await peer.send(attach=attach("late"))
        await until(lambda: peer.attached or peer.code)
        if peer.attached:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never attached: {peer.details}")
