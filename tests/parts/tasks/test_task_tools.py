"""The task tools, as models call them: their answers, and that no owner sees the tasks of another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.parts.tasks.samples import Clock, scope_of
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus.access.identity import Principal
from toolbus.errors import Code, Stage
from toolbus.functions.reply import image
from toolbus.functions.runner import run_handler
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolSpec, spec_of
from toolbus.parts.tasks import TaskManager, TaskTools
from toolbus.parts.tasks.task import home_of, new_id
from toolbus.protocol.tool import Result
from toolbus.testing import running_bus


class Model:
    """Whoever calls the task tools, as a user."""

    def __init__(self, tasks: TaskManager) -> None:
        self.specs: dict[str, ToolSpec] = {}
        for method in TaskTools(tasks).tools():
            spec = spec_of(method)
            self.specs[spec.tool.name] = spec

    async def call(self, name: str, scope: ToolScope | None = None, **arguments: Any) -> Result:
        async with asyncio.timeout(WAIT_SECONDS):
            return await run_handler(self.specs[name], arguments, scope or scope_of("ann"), asyncio.to_thread)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tasks(clock: Clock) -> Iterator[TaskManager]:
    with closing(TaskManager(0, clock=clock)) as manager:
        yield manager


@pytest.fixture
def model(tasks: TaskManager) -> Model:
    return Model(tasks)


async def begin(tasks: TaskManager, user_id: str = "ann") -> tuple[str, asyncio.Future[Any]]:
    work: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return json.loads(await tasks.execute(work, "report", user_id))["task_id"], work


def test_the_tools_say_to_models_and_hosts_what_they_are(model: Model) -> None:
    flags = {name: (spec.tool.no_background, spec.tool.allow_repeat) for name, spec in model.specs.items()}
    assert flags == {
        "check_task": (False, True),
        "await_task": (True, True),
        "list_tasks": (False, False),
        "cancel_task": (False, False),
    }
    for spec in model.specs.values():
        assert "Use it " in spec.tool.description
        assert "scope" not in spec.tool.parameters_json
    waiting = model.specs["await_task"].tool
    assert waiting.timeout_seconds == 300
    schema = json.loads(waiting.parameters_json)
    assert schema["required"] == ["task_id"]
    assert schema["properties"]["timeout"]["default"] == 300
    assert "at most" in schema["properties"]["timeout"]["description"]


async def test_check_task_answers_how_it_is_and_then_its_result(tasks: TaskManager, model: Model, clock: Clock) -> None:
    task_id, work = await begin(tasks)
    clock.now += 12
    answer = (await model.call("check_task", task_id=task_id)).output
    assert {key: answer[key] for key in ("task_id", "tool", "status", "seconds")} == {
        "task_id": task_id,
        "tool": "report",
        "status": "running",
        "seconds": 12,
    }
    assert "await_task" in answer["message"]
    work.set_result({"pages": [1, 2]})
    await tasks.await_result(task_id)
    answer = (await model.call("check_task", task_id=task_id)).output
    assert (answer["status"], answer["result"]) == ("completed", {"pages": [1, 2]})


async def test_what_json_cannot_hold_stands_beside_the_answer(tasks: TaskManager, model: Model) -> None:
    task_id, work = await begin(tasks)
    work.set_result(Result(output_json="no json", content=(image(b"\x01"),)))
    result = await model.call("await_task", task_id=task_id)
    assert result.output["result"] == "no json"
    assert [block.image.data for block in result.content] == [b"\x01"]


async def test_a_failed_task_is_an_answer_that_says_why(tasks: TaskManager, model: Model) -> None:
    task_id, work = await begin(tasks)
    work.set_exception(ValueError("no page 7"))
    for name in ("await_task", "check_task"):
        result = await model.call(name, task_id=task_id)
        assert not result.is_error
        assert (result.output["status"], result.output["error"]) == ("failed", "ValueError: no page 7")


async def test_await_task_answers_as_soon_as_it_is_done(tasks: TaskManager, model: Model) -> None:
    task_id, work = await begin(tasks)
    asyncio.get_running_loop().call_soon(work.set_result, "done")
    assert (await model.call("await_task", task_id=task_id, timeout=300)).output["result"] == "done"


@pytest.mark.parametrize("limited", ["by the model", "by its own deadline"])
async def test_await_task_answers_an_error_in_time_and_the_task_goes_on(
    tasks: TaskManager, model: Model, limited: str
) -> None:
    task_id, work = await begin(tasks)
    scope = scope_of("ann")
    if limited == "by the model":
        result = await model.call("await_task", scope, task_id=task_id, timeout=0.001)
    else:
        scope.deadline = asyncio.get_running_loop().time() + 1.001
        result = await model.call("await_task", scope, task_id=task_id)
    assert result.is_error
    assert result.error is not None
    assert result.error.code is Code.TOOL
    assert "was not done in time. It goes on: call await_task once more" in result.error.message
    assert result.output["status"] == "running"
    assert not work.done()


async def test_list_tasks_shows_ones_own_by_status_and_no_results(tasks: TaskManager, model: Model) -> None:
    first, work = await begin(tasks)
    second, _ = await begin(tasks)
    await begin(tasks, "bob")
    work.set_result("done")
    await tasks.await_result(first)
    answer = (await model.call("list_tasks")).output
    assert answer["count"] == 2
    assert [(each["task_id"], each["status"]) for each in answer["tasks"]] == [
        (second, "running"),
        (first, "completed"),
    ]
    assert "result" not in answer["tasks"][1]
    assert (await model.call("list_tasks", status="completed")).output["count"] == 1
    assert (await model.call("list_tasks", status="failed")).output["note"] == "You have no failed tasks."
    assert (await model.call("list_tasks", scope_of("eve"))).output["note"] == "You have no background tasks."


async def test_a_long_list_shows_the_newest_and_says_so(tasks: TaskManager, model: Model) -> None:
    ids = [(await begin(tasks))[0] for _ in range(51)]
    answer = (await model.call("list_tasks")).output
    assert answer["count"] == 51
    assert [each["task_id"] for each in answer["tasks"]] == ids[:0:-1]
    assert answer["note"] == "Only the newest 50 are shown."


async def test_cancel_task_ends_it_once(tasks: TaskManager, model: Model) -> None:
    task_id, work = await begin(tasks)
    assert (await model.call("cancel_task", task_id=task_id)).output == {"task_id": task_id, "cancelled": True}
    again = (await model.call("cancel_task", task_id=task_id)).output
    assert (again["cancelled"], again["status"]) == (False, "failed")
    await until(work.cancelled)
    assert "cancelled" in (await model.call("check_task", task_id=task_id)).output["error"]


@pytest.mark.parametrize("name", ["check_task", "await_task", "cancel_task"])
async def test_a_foreign_task_is_answered_like_one_that_never_was(tasks: TaskManager, model: Model, name: str) -> None:
    foreign, work = await begin(tasks, "bob")
    never = foreign[:-1] + ("0" if foreign[-1] != "0" else "1")
    answers = []
    for task_id in (foreign, never):
        result = await model.call(name, task_id=task_id)
        assert result.is_error
        answers.append(result.text.replace(task_id, "ID"))
    assert answers[0] == answers[1]
    assert answers[0].startswith("you have no task 'ID': call list_tasks")
    assert not work.done()


async def test_without_a_user_the_program_that_asks_is_the_owner(tasks: TaskManager, model: Model) -> None:
    task_id, _ = await begin(tasks, "source:desk")
    assert (await model.call("check_task", ToolScope(principal=Principal("desk")), task_id=task_id)).output[
        "tool"
    ] == "report"
    for scope in (ToolScope(principal=Principal("other")), ToolScope(), scope_of("desk")):
        assert (await model.call("check_task", scope, task_id=task_id)).is_error


async def test_a_program_without_user_and_name_owns_no_work_of_a_program_without_user(
    tasks: TaskManager, model: Model
) -> None:
    task_id, _ = await begin(tasks, "")
    assert (await model.call("check_task", ToolScope(), task_id=task_id)).is_error


async def test_a_long_unknown_id_is_cut_in_the_answer(model: Model) -> None:
    assert len((await model.call("check_task", task_id="x" * 10_000)).text) < 250


async def test_a_task_of_another_bus_is_not_called_unknown() -> None:
    async with running_bus() as bus, running_bus(unix=True) as other:
        homes = {home_of(each.core.config.bus_id) for each in (bus, other)}
        assert len(homes) == 2
        task_id = new_id(home_of(other.core.config.bus_id))
        for tool in ("check_task", "await_task", "cancel_task"):
            here = await bus.call(f"toolbus:{tool}", {"task_id": task_id})
            assert "begun at another bus" in here.text
            assert here.error is not None
            assert (here.error.code, here.error.stage, here.error.retry_safe) == (
                Code.UNAVAILABLE,
                Stage.NOT_DISPATCHED,
                True,
            )
            there = await other.call(f"toolbus:{tool}", {"task_id": task_id})
            assert "you have no task" in there.text
        for unknown in ("task_1", "task_" + "x" * 20, "x" * 25, new_id()):
            assert "you have no task" in (await bus.call("toolbus:check_task", {"task_id": unknown})).text
