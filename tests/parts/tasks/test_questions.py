"""Tasks that end with questions: they wait, collect answers, and go on under the same id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parts.mcp.server.asking import Json, accepted, answers_of, asks, mcp_bench, question
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus.calls.call import Call
from toolbus.bus.local import LocalCaller
from toolbus.parts.tasks import Status, Task, TaskManager, task_manager
from toolbus.parts.tasks.task import ENDED_WITH_PROCESS
from toolbus.protocol.input_requests import InvalidInput
from toolbus.protocol.tool import Result
from toolbus.v1 import tool_pb2 as pb

FORM = ("elicitation.form",)


def greet(call: Call) -> pb.ToolResult:
    answers = answers_of(call)
    if not answers:
        return asks("s", who=question())
    context = call.context.user_id if call.context is not None else ""
    return pb.ToolResult(output_json=json.dumps([answers["who"]["action"], context]))


async def begun(bench: object, run: Callable[[Call], pb.ToolResult] = greet) -> tuple[TaskManager, str]:
    """Begins a task, and waits until it asks."""
    bus = bench.bus  # type: ignore[attr-defined]
    bench.offer("greet", run, always_background=True)  # type: ignore[attr-defined]
    call = pb.ToolCall(name="greet", accepts=FORM, background_after_seconds=5.0)
    call.context.user_id = "ann"
    caller = LocalCaller("desk", bus.dispatcher)
    task_id = str((await caller.call(call)).output["task_id"])
    tasks: TaskManager = bus.tasks
    async with asyncio.timeout(WAIT_SECONDS):
        while task_of(tasks, task_id).status is Status.RUNNING:
            await asyncio.sleep(0)
    return tasks, task_id


def task_of(tasks: TaskManager, task_id: str) -> Task:
    task = tasks.get_result(task_id)
    assert task is not None
    return task


async def test_a_task_that_asks_is_still_running_for_those_who_know_three_states() -> None:
    async with mcp_bench() as bench:
        tasks, task_id = await begun(bench)
        task = task_of(tasks, task_id)
        assert (task.status, task.running, task.status.shown) == (Status.INPUT_REQUIRED, True, "running")
        assert task.described(0.0)["status"] == "running"
        assert set(task.questions) == {"who"}


async def test_a_task_goes_on_with_its_answers_in_the_context_of_its_call() -> None:
    async with mcp_bench() as bench:
        tasks, task_id = await begun(bench)
        changes: list[Status] = []
        end = tasks.follow(lambda task: changes.append(task.status), "ann")
        answered = tasks.answer(task_id, {"who": accepted(name="x"), "other": 1}, "ann")
        assert answered is not None
        assert answered.status is Status.RUNNING
        task = await tasks.await_result(task_id, 30)
        assert task is not None
        assert (task.status, task.text) == (Status.COMPLETED, '["accept", "ann"]')
        assert changes == [Status.RUNNING, Status.COMPLETED]
        end()


async def test_a_task_that_is_cancelled_while_its_answers_arrive_does_not_run_again() -> None:
    runs: list[Call] = []

    def run(call: Call) -> pb.ToolResult:
        runs.append(call)
        return greet(call)

    async with mcp_bench() as bench:
        tasks, task_id = await begun(bench, run)
        tasks.follow(lambda task: tasks.cancel(task.task_id))
        tasks.answer(task_id, {"who": accepted(name="x")}, "ann")
        for _ in range(10):
            await asyncio.sleep(0)
        assert task_of(tasks, task_id).status is Status.CANCELLED
        assert len(runs) == 1


async def test_answers_of_another_user_or_of_another_form_change_nothing() -> None:
    async with mcp_bench() as bench:
        tasks, task_id = await begun(bench)
        assert tasks.answer(task_id, {"who": accepted(name="x")}, "bob") is None
        with pytest.raises(InvalidInput):
            tasks.answer(task_id, {"who": {"action": "perhaps"}}, "ann")
        assert task_of(tasks, task_id).status is Status.INPUT_REQUIRED
        assert tasks.cancel(task_id)
        late = tasks.answer(task_id, {"who": accepted(name="x")})
        assert late is not None
        assert late.status is Status.CANCELLED


async def test_a_task_that_nobody_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_manager, "INPUT_SECONDS", 0.01)
    async with mcp_bench() as bench:
        tasks, task_id = await begun(bench)
        task = await tasks.await_result(task_id, 30)
        assert task is not None
        assert (task.status, "not all of it was answered" in task.error) == (Status.FAILED, True)


async def test_a_task_may_ask_several_times() -> None:
    rounds: list[Json] = []

    def nag(call: Call) -> pb.ToolResult:
        rounds.append(answers_of(call))
        return asks(str(len(rounds)), who=question()) if len(rounds) < 3 else pb.ToolResult(output_json="3")

    async with mcp_bench() as bench:
        tasks, task_id = await begun(bench, nag)
        for count in (2, 3):
            tasks.answer(task_id, {"who": accepted(name=str(count))})
            async with asyncio.timeout(WAIT_SECONDS):
                while len(rounds) < count or task_of(tasks, task_id).status is Status.RUNNING:
                    await asyncio.sleep(0)
        assert task_of(tasks, task_id).text == "3"
        assert rounds == [{}, {"who": accepted(name="2")}, {"who": accepted(name="3")}]


async def test_a_task_whose_caller_cannot_be_asked_fails() -> None:
    tasks = TaskManager()
    async with mcp_bench() as bench:
        bench.bus.dispatcher.seams.background = tasks
        call = pb.ToolCall(name="greet", background_after_seconds=5.0)
        bench.offer("greet", greet, always_background=True)
        caller = LocalCaller("desk", bench.bus.dispatcher)
        task_id = str((await caller.call(call)).output["task_id"])
        task = await tasks.await_result(task_id, 30)
        assert task is not None
        assert (task.status, task.reason) == (Status.FAILED, "needs_input")


async def test_work_of_a_program_that_asks_fails() -> None:
    tasks = TaskManager(timeout=0.0)
    go = asyncio.Event()

    async def work() -> Result:
        await go.wait()
        return Result(input_requests_json="{}")

    envelope = json.loads(await tasks.execute(work(), "report", "ann"))
    go.set()
    task = await tasks.await_result(envelope["task_id"], 30)
    assert task is not None
    assert task.status is not Status.INPUT_REQUIRED


async def test_a_task_that_asked_when_its_bus_ended_has_failed_after_the_restart(tmp_path: Path) -> None:
    async with mcp_bench(data_dir=tmp_path) as bench:
        _, task_id = await begun(bench)
    async with mcp_bench(data_dir=tmp_path) as bench:
        task = task_of(bench.bus.tasks, task_id)
        assert (task.status, task.error) == (Status.FAILED, ENDED_WITH_PROCESS)
