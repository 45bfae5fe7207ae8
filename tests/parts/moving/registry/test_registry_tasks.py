"""Calls of a registry that become tasks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.parts.moving.registry.example_tools import ANYTHING, BlockedTool
from tests.support.waiting import WAIT_SECONDS, within
from toolbus.parts.tasks import Status
from toolbus.sdk import ToolScope
from toolbus.tools import TaskManager, ToolRegistry

SOON = 0.02  # seconds that callers wait here


@pytest.fixture
def tasks() -> Iterator[TaskManager]:
    tasks = TaskManager(timeout=SOON)
    yield tasks
    tasks.close()


@pytest.fixture
def registry(tasks: TaskManager) -> ToolRegistry:
    return ToolRegistry(tasks)


async def test_a_call_that_takes_long_becomes_a_task_whose_id_its_caller_gets_as_json(
    tasks: TaskManager, registry: ToolRegistry
) -> None:
    held = BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    text = await within(registry.call("waits", {}, "ann"))
    assert type(text) is str
    envelope = json.loads(text)
    assert (envelope["status"], envelope["tool"]) == ("running", "waits")
    task_id = envelope["task_id"]
    assert task_id in [each.task_id for each in tasks.list_tasks("ann")]
    held.release()
    task = await within(tasks.await_result(task_id, user_id="ann"))
    assert task is not None
    assert (task.status, task.text) == (Status.COMPLETED, "released")


async def test_a_call_that_ends_in_time_is_answered_with_its_result() -> None:
    tasks = TaskManager()  # 10 s
    registry = ToolRegistry(tasks)
    registry.tool("quick", "d", ANYTHING)(lambda: "quick")
    assert await registry.call("quick", {}, "ann") == "quick"
    assert tasks.list_tasks("ann") == []
    tasks.close()


async def test_a_timeout_of_0_makes_a_task_of_every_call_that_waits() -> None:
    tasks, held = TaskManager(timeout=0.0), BlockedTool()
    registry = ToolRegistry(tasks)
    registry.tool("waits", "d", ANYTHING)(held)
    assert json.loads(await within(registry.call("waits", {})))["status"] == "running"
    held.release()
    tasks.close()


async def test_a_nested_call_and_a_tool_without_background_are_waited_for(registry: ToolRegistry) -> None:
    held = BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    registry.tool("inline", "d", ANYTHING, no_background=True)(held)
    calls = [
        asyncio.create_task(registry.call("waits", {}, nested=True)),
        asyncio.create_task(registry.call("inline", {})),
    ]
    assert (
        json.loads(await within(registry.call("waits", {})))["status"] == "running"
    )  # their soft deadline has passed too
    assert not any(call.done() for call in calls)
    held.release()
    assert await within(asyncio.gather(*calls)) == ["released", "released"]


@pytest.mark.parametrize("no_background", [False, True])
@pytest.mark.parametrize("nested", [False, True])
async def test_a_tool_without_a_timeout_may_run_for_a_day_with_any_caller(
    registry: ToolRegistry, no_background: bool, nested: bool
) -> None:
    left: list[float] = []

    @registry.tool("asks", "d", ANYTHING, no_background=no_background)
    async def asks(scope: ToolScope) -> str:
        left.append(scope.time_left())
        return ""

    await registry.call("asks", {}, nested=nested)
    assert 86_390 < left[0] <= 86_400


async def test_a_compound_tool_gets_results_of_tools_that_take_long(registry: ToolRegistry, tasks: TaskManager) -> None:
    held = BlockedTool()
    registry.tool("inner", "d", ANYTHING)(held)

    @registry.tool("outer", "d", ANYTHING)
    async def outer() -> str:
        return "outer " + await registry.call("inner", {}, nested=True)

    task_id = json.loads(await within(registry.call("outer", {}, "ann")))["task_id"]
    held.release()
    task = await within(tasks.await_result(task_id))
    assert task is not None
    assert task.text == "outer released"


async def test_a_failed_task_has_the_reason(tasks: TaskManager, registry: ToolRegistry) -> None:
    go = asyncio.Event()

    @registry.tool("fails", "d", ANYTHING)
    async def fails() -> str:
        await go.wait()
        raise ValueError("no such city")

    task_id = json.loads(await within(registry.call("fails", {})))["task_id"]
    go.set()
    task = await within(tasks.await_result(task_id))
    assert task is not None
    assert (task.status, task.error) == (Status.FAILED, "ValueError: no such city")


async def test_a_model_asks_for_its_task_by_tools_of_their_bare_and_their_full_names(registry: ToolRegistry) -> None:
    held = BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    task_id = json.loads(await within(registry.call("waits", {}, "ann")))["task_id"]
    for name in ("check_task", "toolbus:check_task"):
        assert json.loads(await registry.call(name, {"task_id": task_id}, "ann"))["status"] == "running"
    assert json.loads(await registry.call("list_tasks", {}, "ann"))["count"] == 1
    waiting = asyncio.create_task(registry.call("await_task", {"task_id": task_id}, "ann"))
    held.release()
    assert json.loads(await within(waiting))["result"] == "released"


async def test_a_task_of_another_user_is_not_found(registry: ToolRegistry, tasks: TaskManager) -> None:
    held = BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    task_id = json.loads(await within(registry.call("waits", {}, "ann")))["task_id"]
    for user in ("eve", ""):
        for name in ("check_task", "await_task", "cancel_task"):
            assert f"you have no task '{task_id}'" in await within(registry.call(name, {"task_id": task_id}, user))
        assert json.loads(await registry.call("list_tasks", {}, user))["count"] == 0
    assert held.cancelled == 0
    assert tasks.get_result(task_id, "eve") is None
    held.release()


async def test_cancelling_a_task_cancels_its_handler(registry: ToolRegistry, tasks: TaskManager) -> None:
    held = BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    task_id = json.loads(await within(registry.call("waits", {}, "ann")))["task_id"]
    assert json.loads(await registry.call("cancel_task", {"task_id": task_id}, "ann"))["cancelled"] is True
    async with asyncio.timeout(WAIT_SECONDS):
        while not held.cancelled:
            await asyncio.sleep(0)
    task = tasks.get_result(task_id)
    assert task is not None
    assert (task.status, task.status.shown) == (Status.CANCELLED, "failed")


async def test_a_task_can_be_cancelled_from_another_thread(registry: ToolRegistry, tasks: TaskManager) -> None:
    held = BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    task_id = json.loads(await within(registry.call("waits", {})))["task_id"]
    thread = threading.Thread(target=tasks.cancel, args=(task_id,))
    thread.start()
    async with asyncio.timeout(WAIT_SECONDS):
        while not held.cancelled:
            await asyncio.sleep(0.001)
    thread.join(WAIT_SECONDS)


async def test_cancelling_a_caller_that_has_its_task_does_not_cancel_the_task(
    registry: ToolRegistry, tasks: TaskManager
) -> None:
    held = BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    call = asyncio.create_task(registry.call("waits", {}))
    task_id = json.loads(await within(call))["task_id"]
    call.cancel()
    held.release()
    task = await within(tasks.await_result(task_id))
    assert task is not None
    assert task.text == "released"


async def test_the_context_of_a_call_stays_with_its_task(registry: ToolRegistry, tasks: TaskManager) -> None:
    held = BlockedTool()

    @registry.tool("waits", "d", ANYTHING)
    async def waits(ctx: Any = None) -> str:
        await held()
        return str(ctx)

    task_id = json.loads(await within(registry.call("waits", {}, ctx="given")))["task_id"]
    held.release()
    task = await within(tasks.await_result(task_id))
    assert task is not None
    assert task.text == "given"


async def test_task_tools_can_be_offered_to_models(registry: ToolRegistry) -> None:
    registry.offer_task_tools()
    assert "await_task" in registry.repeat_allowed_tools()
    by_name = {each.name: each for each in registry.list_tools()}
    assert by_name["await_task"].no_background
    assert "you have no task" in await registry.call("check_task", {"task_id": "task_1"})


async def test_without_a_task_manager_every_call_runs_to_its_end() -> None:
    registry, held = ToolRegistry(), BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    call = asyncio.create_task(registry.call("waits", {}))
    done, _ = await asyncio.wait([call], timeout=2 * SOON)
    assert not done
    held.release()
    assert await within(call) == "released"
    assert await registry.call("check_task", {}) == "there is no tool 'check_task'; there are: waits"


async def test_one_task_manager_serves_calls_of_several_loops(registry: ToolRegistry, tasks: TaskManager) -> None:
    held = BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)

    async def elsewhere() -> str:
        task_id = json.loads(await within(registry.call("waits", {})))["task_id"]
        held.release()
        task = await within(tasks.await_result(task_id))
        assert task is not None
        return task.text

    assert await asyncio.to_thread(lambda: asyncio.run(elsewhere())) == "released"
    assert await registry.call("waits", {}) == "released"


async def test_a_task_manager_that_is_set_later_takes_the_calls_from_then_on() -> None:
    registry, held = ToolRegistry(), BlockedTool()
    registry.tool("waits", "d", ANYTHING)(held)
    registry.tool("quick", "d", ANYTHING)(lambda: "quick")
    assert await registry.call("quick", {}) == "quick"  # this loop's dispatcher exists by now
    with pytest.raises(ValueError, match="has no task manager"):
        registry.offer_task_tools()
    first, second = TaskManager(timeout=SOON), TaskManager(timeout=SOON)
    registry.task_manager = first
    task_id = json.loads(await within(registry.call("waits", {}, "ann")))["task_id"]
    assert task_id in await registry.call("list_tasks", {}, "ann")
    registry.offer_task_tools()
    registry.task_manager = second
    assert registry.task_manager is second
    assert task_id not in await registry.call("list_tasks", {}, "ann")
    other = json.loads(await within(registry.call("waits", {}, "ann")))["task_id"]
    assert [each.task_id for each in first.list_tasks("ann")] == [task_id]
    assert [each.task_id for each in second.list_tasks("ann")] == [other]
    registry.task_manager = None
    assert registry.tool_names() == {"waits", "quick"}
    call = asyncio.create_task(registry.call("waits", {}, "ann"))
    await asyncio.sleep(SOON * 3)
    held.release()
    assert await within(call) == "released"
    first.close()
    second.close()
