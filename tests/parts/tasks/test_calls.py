"""Calls that become tasks: on a real dispatcher, from its soft timeout to their result."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus.access.identity import Principal
from toolbus.bus.calls.call import Call, Caller, Seams
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.entry import compile_tool
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.local import LocalCaller, LocalHandler
from toolbus.errors import Code
from toolbus.functions.call_context import CallContext
from toolbus.functions.tool_spec import spec_of
from toolbus.parts.tasks import Status, Task, TaskCaller, TaskManager
from toolbus.parts.tasks.delivery import MAX_MESSAGE
from toolbus.protocol.tool import Limits, Progress, Result
from toolbus.sdk import ToolScope, llm_tool
from toolbus.v1 import tool_pb2 as pb


class Bench:
    """One tool, that ends when it is told to, on a dispatcher that makes tasks of its calls."""

    def __init__(self, tasks: TaskManager) -> None:
        self.tasks = tasks
        self.step = asyncio.Event()  # has the tool report progress
        self.go = asyncio.Event()  # has it end
        self.cancelled = False
        self.loop = asyncio.get_running_loop()
        registry = Registry()
        self.dispatcher = Dispatcher(
            registry, Policy(), CallRecords(), Limits(), arm=self._arm, seams=Seams(background=tasks)
        )
        self.caller = LocalCaller("desk", self.dispatcher)
        spec = spec_of(self.report)
        handler = LocalHandler("shop", spec, lambda: self.dispatcher)
        registry.register(handler, [compile_tool(spec.tool, Limits())])

    def _arm(self, when: float) -> None:
        self.loop.call_later(
            max(0.0, when - time.monotonic()), lambda: self.dispatcher.deadlines.sweep(time.monotonic())
        )

    @llm_tool
    async def report(self, scope: ToolScope, fail: bool = False) -> dict[str, Any]:
        try:
            await self.step.wait()
            scope.progress(3, total=10, message="page 3")
            scope.progress(chunk="text")
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if fail:
            raise ValueError("no page 7")
        return {"pages": 7}

    async def begin(self, arguments_json: str = "{}", user_id: str = "") -> str:
        """Makes a call that becomes a task. Returns the task's id."""
        call = pb.ToolCall(
            name="report",
            arguments_json=arguments_json,
            background_after_seconds=0.001,
            context=CallContext(user_id=user_id).to_wire() if user_id else None,
        )
        async with asyncio.timeout(WAIT_SECONDS):
            answer = (await self.caller.call(call)).output
        assert (answer["status"], answer["tool"]) == ("running", "report")
        return str(answer["task_id"])

    def seen(self, task_id: str) -> Task:
        task = self.tasks.get_result(task_id)
        assert task is not None
        return task

    async def done(self, task_id: str, user_id: str | None = None) -> Task:
        task = await self.tasks.await_result(task_id, WAIT_SECONDS, user_id)
        assert task is not None
        assert not task.running
        return task


@asynccontextmanager
async def bench(**settings: Any) -> AsyncIterator[Bench]:
    tasks = TaskManager(**settings)
    try:
        yield Bench(tasks)
    finally:
        tasks.close()


async def test_a_call_becomes_a_task_and_its_result_comes_there() -> None:
    async with bench() as tried:
        task_id = await tried.begin()
        tried.step.set()
        await until(lambda: tried.seen(task_id).progress == Progress(3, 10, "page 3"))
        assert tried.dispatcher.in_flight.active == 1
        tried.go.set()
        task = await tried.done(task_id, "source:desk")
        assert (task.status, task.text) == (Status.COMPLETED, '{"pages":7}')
        assert task.result == Result(task_id, '{"pages":7}')
        assert tried.dispatcher.in_flight.active == 0
        assert tried.dispatcher.in_flight.held == 0
        assert tried.caller.budget.held == 0


def test_progress_of_a_task_is_short_and_has_numbers_of_json() -> None:
    caller = TaskCaller(Principal("desk"), DISPATCHER.budget("desk"), lambda task_id, result: None)
    caller.progress("task_1", pb.ToolProgress(progress=math.nan, total=math.inf, message="m" * 3_000_000))
    assert caller.latest == Progress(0.0, 0.0, "m" * MAX_MESSAGE)


async def test_a_call_for_a_user_becomes_his_task() -> None:
    async with bench() as tried:
        task_id = await tried.begin(user_id="ann")
        assert tried.tasks.get_result(task_id, "source:desk") is None
        assert tried.tasks.get_result(task_id, "ann") is not None


async def test_a_call_that_fails_later_is_a_failed_task() -> None:
    async with bench() as tried:
        task_id = await tried.begin('{"fail":true}')
        tried.step.set()
        tried.go.set()
        task = await tried.done(task_id)
        assert (task.status, task.error) == (Status.FAILED, "ValueError: no page 7")


async def test_cancelling_the_task_cancels_the_call_on_its_loop() -> None:
    async with bench() as tried:
        task_id = await tried.begin()
        assert await asyncio.to_thread(tried.tasks.cancel, task_id)
        task = await tried.done(task_id)
        assert task.error.startswith("cancelled")
        await until(lambda: tried.cancelled)
        await until(
            lambda: (
                tried.dispatcher.in_flight.active
                == tried.dispatcher.in_flight.stuck
                == tried.dispatcher.in_flight.held
                == 0
            )
        )
        assert tried.dispatcher.records.outcomes[Code.CANCELLED] == 1
        assert await tried.done(task_id) == task


async def test_a_task_goes_on_when_its_first_caller_is_gone() -> None:
    async with bench() as tried:
        task_id = await tried.begin()
        tried.dispatcher.endings.caller_ended(list(tried.caller.in_flight.values()), time.monotonic())
        tried.step.set()
        tried.go.set()
        assert (await tried.done(task_id)).status is Status.COMPLETED


async def test_where_there_is_no_room_the_caller_waits_for_the_result() -> None:
    async with bench(running_per_owner=1) as tried:
        await tried.begin()
        call = pb.ToolCall(name="report", arguments_json="{}", background_after_seconds=0.001)
        waiting = asyncio.ensure_future(tried.caller.call(call))
        await until(lambda: not tried.dispatcher.in_flight.soft_deadlines)
        tried.step.set()
        tried.go.set()
        assert (await waiting).output == {"pages": 7}


async def test_when_the_dispatcher_stops_its_tasks_fail_with_its_error() -> None:
    async with bench() as tried:
        task_id = await tried.begin()
        tried.dispatcher.stop(time.monotonic())
        assert (await tried.done(task_id)).error == "the bus stopped"


async def test_a_task_whose_dispatcher_has_no_loop_any_more_ends_without_it() -> None:
    async with bench() as tried:
        task_id = await tried.begin()
        closed = asyncio.new_event_loop()
        closed.close()
        tried.loop = closed
        assert tried.tasks.cancel(task_id)
        assert (await tried.done(task_id)).status is Status.CANCELLED


def played_call(source: str, user_id: str = "", parent: Call | None = None) -> Call:
    call = Call()
    call.context = pb.CallContext(user_id=user_id) if user_id else None
    call.parent = parent
    call.exchange = None
    call.call_id, call.started = "c-1", 3.0
    call.caller = TaskCaller(Principal(source), Dispatcher.budget(DISPATCHER, source), lambda *_: None)
    call.entry = NAMED
    return call


class _Named:
    name = "report"


NAMED: Any = _Named()
DISPATCHER = Dispatcher(Registry(), Policy(), CallRecords(), Limits(), arm=lambda _: None)


@pytest.mark.parametrize(
    ("call", "owner"),
    [
        (played_call("desk"), "source:desk"),
        (played_call("desk", "ann"), "ann"),
        (played_call("shop", parent=played_call("mid", parent=played_call("desk"))), "source:desk"),
        (played_call("shop", "ann", parent=played_call("desk", "ann")), "ann"),
    ],
)
def test_the_owner_is_the_user_else_the_source_of_the_outermost_call(call: Call, owner: str) -> None:
    tasks = TaskManager(clock=lambda: 1000.0)
    adopted = tasks.adopt(call, 5.0)
    assert adopted is not None
    caller, task_id, result = adopted
    checked: Caller = caller
    assert (checked.source, checked.budget, checked.in_flight) == (call.caller.source, call.caller.budget, {})
    assert result.call_id == "c-1"
    task = tasks.get_result(task_id, owner)
    assert task is not None
    assert task.started == 998.0
    assert tasks.cancel(task_id)  # though no loop is left that could cancel the call
    caller.deliver([(task_id, "1")])
    assert tasks.get_result(task_id) == tasks.list_tasks(owner)[0]
    assert tasks.list_tasks(owner)[0].status is Status.CANCELLED
    tasks.close()
    assert tasks.adopt(call, 5.0) is None
