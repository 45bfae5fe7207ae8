from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any, cast

import grpc
import pytest

from tests.sdk.connection_cases import free_address, plugin_with
from tests.sdk.played_bus import PlayedStream, played_bus
from tests.support.waiting import within
from toolbus.errors import (
    Code,
    PeerLost,
    Stage,
)
from toolbus.functions.scope import ToolScope
from toolbus.protocol.tool import CallError
from toolbus.sdk.grpc_transport import status_of
from toolbus.sdk.host import Host
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

# -- calls out --------------------------------------------------------------------------------------------------------


async def test_a_status_that_grpc_hides_behind_a_failed_write_counts_as_a_lost_bus() -> None:
    async def play(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.end(grpc.StatusCode.UNAVAILABLE, "the bus restarts")

    async with played_bus(play) as bus, grpc.aio.insecure_channel(bus.address) as channel:
        stream = cast(Any, rpc.ToolBusServiceStub(channel)).Invoke()
        await stream.write(wire.InvokeRequest(attach=wire.Attach(protocol_version=1, source="calc")))
        await asyncio.sleep(0.3)  # the answer and the status are there, and nobody reads them
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await within(stream.write(wire.InvokeRequest(heartbeat=wire.Heartbeat(sequence=1))))
    code, text = status_of(lost.value)
    assert code == "UNAVAILABLE"
    assert "hides why" in text or text == "the bus restarts"


async def test_without_a_bus_a_call_ends_when_its_time_is_up_and_names_the_address() -> None:
    address = free_address()
    async with Host(address) as host:
        error = (await within(host.call("add", timeout=0.2))).error
        assert error is not None
        assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
        assert address in error.message
        assert "toolbus serve" in error.message
        with pytest.raises(PeerLost, match=address):
            await within(host.list(timeout=0.2))


async def test_a_call_whose_connection_breaks_is_not_sent_again() -> None:
    async def break_off(stream: PlayedStream) -> None:
        await stream.accept()
        frame = await stream.read_until("calls")
        await stream.write(progress=[pb.ToolProgress(call_id=frame.calls[0].call_id)])
        await stream.end(grpc.StatusCode.UNAVAILABLE, "gone")

    async def accept(stream: PlayedStream) -> None:
        await stream.accept()
        assert not (await stream.read() or wire.InvokeRequest()).calls

    async with played_bus(break_off, accept) as bus, Host(bus.address) as host:
        both = await within(asyncio.gather(host.call("first"), host.call("second")))
        errors = [result.error for result in both if result.error]
        assert [error.code for error in errors] == [Code.UNAVAILABLE] * 2
        assert sorted(error.stage for error in errors) == [Stage.ACCEPTED, Stage.UNKNOWN]
        assert not any(error.retry_safe for error in errors)


async def test_a_nested_call_is_never_sent_on_another_session_than_its_parents() -> None:
    errors: list[CallError | None] = []
    ended = asyncio.Event()

    async def outer(ctx: ToolScope) -> None:
        nested = asyncio.ensure_future(ctx.call("inner", {"first": True}))
        with contextlib.suppress(asyncio.CancelledError):  # the connection broke, before or after it ended the call
            await asyncio.shield(nested)
            await asyncio.Event().wait()
        errors.append((await nested).error)
        errors.append((await ctx.call("inner", {"first": False})).error)
        ended.set()

    async def break_off(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.write(calls=[pb.ToolCall(call_id="1", name="outer", timeout_seconds=30.0)])
        assert (await stream.read_until("calls")).calls[0].parent_call_id == "1"
        await stream.end(grpc.StatusCode.UNAVAILABLE, "gone")

    async def call_as_another_user(stream: PlayedStream) -> None:
        await stream.accept()
        await within(ended.wait())
        await stream.write(heartbeat=wire.Heartbeat(sequence=1))
        assert not (await stream.read_until("heartbeat")).calls

    async with played_bus(break_off, call_as_another_user) as bus, plugin_with(bus.address, outer):
        await within(ended.wait())
    assert [(error.code, error.stage, error.retry_safe) for error in errors if error] == [
        (Code.UNAVAILABLE, Stage.UNKNOWN, False),
        (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, False),
    ]


async def test_calls_that_a_draining_bus_did_not_answer_are_retried_on_the_next() -> None:
    async def say_goodbye(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.read_until("calls")
        await stream.write(drain=wire.Drain(reason="shutdown"))

    async def answer(stream: PlayedStream) -> None:
        await stream.accept()
        call = (await stream.read_until("calls")).calls[0]
        await stream.write(results=[pb.ToolResult(call_id=call.call_id, output_json="7")])
        await stream.read()

    async with played_bus(say_goodbye, answer) as bus, Host(bus.address) as host:
        assert (await within(host.call("add"))).output == 7


@pytest.mark.parametrize(
    ("code", "retry_safe", "calls"), [(6, True, 3), (7, True, 3), (6, False, 1), (7, False, 1), (8, True, 1)]
)
async def test_only_unavailable_and_overloaded_are_sent_again_and_only_where_that_is_safe(
    code: int, retry_safe: bool, calls: int
) -> None:
    ids = []

    async def refuse_twice(stream: PlayedStream) -> None:
        await stream.accept()
        while (frame := await stream.read()) is not None:
            for call in frame.calls:
                ids.append(call.call_id)
                error = pb.CallError(
                    code=cast(Any, code), retry_safe=retry_safe, message="no", retry_after_seconds=0.01
                )
                refusal = pb.ToolResult(call_id=call.call_id, is_error=True, error=error)
                answer = pb.ToolResult(call_id=call.call_id, output_json="1")
                await stream.write(results=[refusal if len(ids) < 3 else answer])

    async with played_bus(refuse_twice) as bus, Host(bus.address) as host:
        result = await within(host.call("add"))
        assert len(ids) == len(set(ids)) == calls
        assert (result.error is None) == (calls == 3)


async def test_a_last_attempt_that_went_nowhere_does_not_hide_that_an_earlier_one_may_have_run() -> None:
    async def lose_then_refuse(stream: PlayedStream) -> None:
        await stream.accept()
        stages = [pb.CALL_STAGE_DISPATCHED, pb.CALL_STAGE_NOT_DISPATCHED]
        while stages and (frame := await stream.read()) is not None:
            for call in frame.calls:
                stage = stages.pop(0)
                code = pb.ERROR_CODE_UNAVAILABLE if stages else pb.ERROR_CODE_NOT_FOUND
                error = pb.CallError(code=code, stage=stage, retry_safe=bool(stages), message=f"{len(stages)} to go")
                await stream.write(results=[pb.ToolResult(call_id=call.call_id, is_error=True, error=error)])

    async with played_bus(lose_then_refuse) as bus, Host(bus.address) as host:
        error = (await within(host.call("add"))).error
        assert error is not None
        assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.DISPATCHED, True)
        assert error.message == "1 to go"


@pytest.mark.parametrize(
    ("hint", "schema_hash", "code"),
    [(0.0, "", Code.UNAVAILABLE), (0.01, "0f", Code.UNAVAILABLE), (0.01, "", Code.NOT_FOUND)],
    ids=["offline", "reconnecting and declared", "a name of which nothing is known"],
)
async def test_a_tool_that_goes_while_a_call_waits_for_its_plugin_is_unavailable(
    hint: float, schema_hash: str, code: Code
) -> None:
    async def go(stream: PlayedStream) -> None:
        await stream.accept()
        away = "add is offline"
        errors = [
            pb.CallError(code=pb.ERROR_CODE_UNAVAILABLE, retry_safe=True, message=away, retry_after_seconds=hint),
            pb.CallError(code=pb.ERROR_CODE_NOT_FOUND, message="there is no tool add"),
        ]
        while errors and (frame := await stream.read()) is not None:
            for call in frame.calls:
                await stream.write(results=[pb.ToolResult(call_id=call.call_id, is_error=True, error=errors.pop(0))])

    async with played_bus(go) as bus, Host(bus.address) as host:
        error = (await within(host.call("add", schema_hash=schema_hash))).error
        assert error is not None
        assert (error.code, error.retry_safe) == (code, code is Code.UNAVAILABLE)
        assert error.message.endswith("there is no tool add")
        assert ("add is offline; the last attempt: " in error.message) == error.retry_safe


async def test_a_refusal_is_handed_on_when_the_time_for_another_attempt_is_over() -> None:
    async def refuse(stream: PlayedStream) -> None:
        await stream.accept()
        while (frame := await stream.read()) is not None:
            for call in frame.calls:
                error = pb.CallError(
                    code=pb.ERROR_CODE_OVERLOADED, retry_safe=True, message="full", retry_after_seconds=60
                )
                await stream.write(results=[pb.ToolResult(call_id=call.call_id, is_error=True, error=error)])

    async with played_bus(refuse) as bus, Host(bus.address) as host:
        error = (await within(host.call("add", timeout=1))).error
        assert error is not None
        assert error.message == "full"


async def test_a_bus_that_hangs_does_not_hang_its_callers() -> None:
    async def hang(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.read_until("calls")
        cancelled.append((await stream.read_until("cancels")).cancels[0].reason)

    cancelled: list[str] = []
    async with played_bus(hang) as bus, Host(bus.address) as host:
        await within(host.ready())  # a call that ends before there is a stream was never sent
        error = (await within(host.call("add", timeout=0.05))).error
        assert error is not None
        assert (error.code, error.stage, error.limit) == (
            Code.DEADLINE_EXCEEDED,
            Stage.UNKNOWN,
            ("timeout_seconds", 0.05),
        )
    assert cancelled == ["timeout_seconds"]


async def test_calls_beyond_the_limit_wait_here_and_go_out_in_order() -> None:
    order: list[str] = []
    most = 0

    async def serve_two(stream: PlayedStream) -> None:
        nonlocal most
        await stream.accept(calls_in_flight=2)
        open_calls: list[str] = []
        while (frame := await stream.read()) is not None:
            order.extend(call.arguments_json for call in frame.calls)
            open_calls += [call.call_id for call in frame.calls]
            most = max(most, len(open_calls))
            await stream.write(results=[pb.ToolResult(call_id=each, output_json="1") for each in open_calls])
            open_calls.clear()

    async with played_bus(serve_two) as bus, Host(bus.address) as host:
        await within(asyncio.gather(*(host.call("add", str(number)) for number in range(10))))
    assert most <= 2
    assert order == [str(number) for number in range(10)]


async def test_arguments_beyond_the_limit_are_refused_here_and_the_stream_lives() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        error = (await within(host.call("add", {"a": "ä" * (9 << 20)}))).error
        assert error is not None
        assert (error.code, error.limit) == (Code.INVALID_ARGUMENTS, ("arguments_bytes", float(1 << 20)))
        other = (await within(host.call("nothing", timeout=0.1))).error
        assert other is not None
        assert other.code in (Code.UNAVAILABLE, Code.NOT_FOUND)  # the bus is settling


async def test_lone_surrogates_of_a_model_travel_as_their_escapes() -> None:
    async def echo(stream: PlayedStream) -> None:
        await stream.accept()
        call = (await stream.read_until("calls")).calls[0]
        await stream.write(results=[pb.ToolResult(call_id=call.call_id, output_json=call.arguments_json)])
        await stream.read()

    async with played_bus(echo) as bus, Host(bus.address) as host:
        result = await within(host.call("add", {"a": "\ud83d"}))
        assert json.loads(result.output_json) == {"a": "\ud83d"}


async def test_connects_and_losses_are_logged_and_calls_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "toolbus.sdk")

    async def end(stream: PlayedStream) -> None:
        await stream.accept()
        call = (await stream.read_until("calls")).calls[0]
        await stream.write(results=[pb.ToolResult(call_id=call.call_id)])
        await stream.end(grpc.StatusCode.UNAVAILABLE, "the plug was pulled")

    async def accept(stream: PlayedStream) -> None:
        await stream.accept()
        again.set()
        await stream.read()

    again = asyncio.Event()
    async with played_bus(end, accept) as bus, Host(bus.address, source="host:1") as host:
        await within(host.call("add"))
        await within(again.wait())
        await within(host.ready())
    words = [record.getMessage() for record in caplog.records if record.name.startswith("toolbus.sdk")]
    assert len(words) == 3
    assert "attached" in words[0]
    assert "the plug was pulled" in words[1]
    assert "attached" in words[2]
