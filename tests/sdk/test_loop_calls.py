"""Caller: the calls of one turn of a program's loop travel together, and so do the ends of a batch."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import cast

import pytest

from tests.sdk.played_bus import SECONDS, PlayedStream, played_bus
from tests.support.waiting import within
from toolbus.protocol.tool import Progress, Result
from toolbus.sdk import Host
from toolbus.sdk.connection import Connection
from toolbus.sdk.host import ThreadCaller
from toolbus.sdk.outgoing_calls import OutgoingCall
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

USER: ContextVar[str] = ContextVar("USER", default="")


def answers(frame: wire.InvokeRequest) -> list[pb.ToolResult]:
    return [pb.ToolResult(call_id=call.call_id, output_json=call.arguments_json) for call in frame.calls]


async def test_calls_that_tasks_make_in_one_turn_travel_in_one_message_and_so_do_their_next_ones() -> None:
    sizes: list[int] = []

    async def serve(stream: PlayedStream) -> None:
        await stream.accept()
        while (frame := await stream.read()) is not None:
            if frame.calls:
                sizes.append(len(frame.calls))
                await stream.write(results=answers(frame))

    async def call(host: Host, number: int) -> list[str]:
        return [(await host.call("echo", f"{number}{again}")).output_json for again in range(3)]

    async with played_bus(serve) as bus, Host(bus.address) as host:
        await within(host.call("echo"))  # the connection is there
        results = await within(asyncio.gather(*(call(host, number) for number in range(1, 31))))
    assert results == [[f"{number}{again}" for again in range(3)] for number in range(1, 31)]
    assert sizes == [1, 30, 30, 30]


async def test_cancelling_many_calls_cancels_each_of_them_at_the_bus() -> None:
    begun, cancelled = asyncio.Event(), set[str]()
    seen = set[str]()
    done = asyncio.Event()

    async def hold(stream: PlayedStream) -> None:
        await stream.accept()
        while (frame := await stream.read()) is not None:
            seen.update(call.call_id for call in frame.calls)
            if seen:
                begun.set()
            cancelled.update(cancel.call_id for cancel in frame.cancels)
            if len(cancelled) == 3:
                done.set()

    async with played_bus(hold) as bus, Host(bus.address) as host:
        calling = asyncio.create_task(host.call_many([("echo", None)] * 3))
        await within(begun.wait())
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await within(calling)
        await within(done.wait())
    assert cancelled == seen


async def test_a_host_whose_program_blocks_echoes_heartbeats_and_takes_results() -> None:
    echoed = threading.Event()
    goes_on = asyncio.Event()

    async def beat(stream: PlayedStream) -> None:
        await stream.accept()
        calls = await stream.read_until("calls")
        goes_on.set()
        for sequence in (7, 8):
            await stream.write(heartbeat=wire.Heartbeat(sequence=sequence))
            frame = await stream.read_until("heartbeat")
            assert frame.heartbeat.sequence == sequence
        await stream.write(results=answers(calls))
        echoed.set()
        while await stream.read() is not None:
            pass

    def program(address: str, here: asyncio.AbstractEventLoop) -> str:
        async def run() -> str:
            async with Host(address) as host:
                calling = asyncio.create_task(host.call("echo", '"late"'))
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(goes_on.wait(), here))
                assert echoed.wait(SECONDS)  # blocks this loop
                return (await calling).output_json

        return asyncio.run(run())

    async with played_bus(beat) as bus:
        assert await within(asyncio.to_thread(program, bus.address, asyncio.get_running_loop())) == '"late"'


async def test_progress_comes_on_the_loop_of_the_caller_before_the_result_and_without_its_context_variables() -> None:
    async def serve(stream: PlayedStream) -> None:
        await stream.accept()
        while (frame := await stream.read()) is not None:
            for call in frame.calls:
                steps = [pb.ToolProgress(call_id=call.call_id, progress=step) for step in (1, 2)]
                await stream.write(progress=steps, results=answers(frame))

    async with played_bus(serve) as bus, Host(bus.address) as host:
        for _ in range(3):  # on the connection's thread, then in turns of this loop
            seen: list[object] = []

            def note(progress: Progress, seen: list[object] = seen) -> None:
                seen.append((progress.progress, asyncio.get_running_loop(), USER.get()))

            token = USER.set("mallory")
            result = await within(host.call("echo", on_progress=note))
            seen.append(result.output_json)
            USER.reset(token)
            here = asyncio.get_running_loop()
            assert seen == [(1.0, here, ""), (2.0, here, ""), "{}"]
            await asyncio.sleep(0.02)


# -- threads -----------------------------------------------------------------------------------------------------------


class Line:
    """Stands for the connection of a `ThreadCaller`: notes what is sent together, and fires its timer by hand."""

    def __init__(self) -> None:
        self.sent: list[list[OutgoingCall]] = []
        self.timers: list[Callable[[], object]] = []
        self.loop = self.calls = self

    def begin_many(self, calls: Iterable[OutgoingCall]) -> None:
        self.sent.append(list(calls))

    def call_later(self, seconds: float, function: Callable[[], object]) -> None:
        self.timers.append(function)


def thread_calls(count: int) -> tuple[Line, ThreadCaller, list[OutgoingCall]]:
    line = Line()
    caller = ThreadCaller(cast(Connection, line))
    return line, caller, [OutgoingCall("echo", "{}", caller.deliver, queue.SimpleQueue()) for _ in range(count)]


def test_a_lone_call_of_a_thread_is_sent_at_once_also_after_a_lone_result() -> None:
    line, caller, (first, second) = thread_calls(2)
    caller.begin(first)
    first.finish(Result(output_json="1"))
    assert first.target.get().output_json == "1"
    caller.begin(second)
    assert line.sent == [[first], [second]]
    assert not line.timers


def test_calls_of_threads_that_got_their_results_together_are_sent_together() -> None:
    line, caller, calls = thread_calls(7)
    for out in calls[:3]:
        out.finish(Result())
    for out in calls[3:6]:
        caller.begin(out)
    assert line.sent == [calls[3:6]]
    caller.begin(calls[6])
    assert line.sent[1:] == [calls[6:]]


def test_a_call_that_waits_for_others_which_do_not_come_is_sent_by_one_timer() -> None:
    line, caller, calls = thread_calls(5)
    for out in calls[:3]:
        out.finish(Result())
    caller.begin(calls[3])
    assert not line.sent
    (fire,) = line.timers
    fire()
    assert line.sent == [[calls[3]]]
    caller.begin(calls[4])
    assert line.sent == [[calls[3]], [calls[4]]]


def test_a_call_that_a_thread_makes_while_its_host_closes_ends_all_the_same() -> None:
    line, caller, calls = thread_calls(3)
    for out in calls[:2]:
        out.finish(Result())
    caller.begin(calls[2])
    caller.send()  # as `SyncHost.close` does in the end
    assert line.sent == [[calls[2]]]
