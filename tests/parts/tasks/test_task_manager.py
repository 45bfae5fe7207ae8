"""The TaskManager: work that takes long goes on, is fetched later, and ends exactly once."""

# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name

from __future__ import annotations

import asyncio
import json
import logging
import threading
from contextlib import closing
from typing import Any

import pytest

from tests.parts.tasks.samples import Clock, Receiver
from tests.parts.tasks.task_cases import SOON, Work, awaited, begin, clock, task_of, tasks
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.errors import Code
from toolbus.parts.tasks import Status, Task, TaskEvents, TaskManager
from toolbus.protocol.tool import CallError, Result

# ── what ends in time ──


@pytest.mark.parametrize(
    ("value", "text"),
    [("a text", "a text"), ("\ud800", "\ud800"), ({"ä": [1]}, '{"ä":[1]}'), (None, "null"), (Result("", '"x"'), "x")],
)
async def test_work_that_ends_in_time_is_answered_as_it_is(value: Any, text: str) -> None:
    work = Work()
    work.go.set()
    with closing(TaskManager()) as tasks:
        assert await tasks.execute(work(value), "report", "ann") == text
        assert tasks.list_tasks("ann") == []


async def test_what_fails_in_time_raises_as_if_it_had_been_awaited() -> None:
    work = Work()
    work.go.set()
    with closing(TaskManager()) as tasks:
        with pytest.raises(KeyError, match="page"):
            await tasks.execute(work(KeyError("page")), "report")
        with pytest.raises(TypeError, match="JSON cannot hold"):
            await tasks.execute(work(object()), "report")


async def test_cancelling_the_wait_cancels_work_that_is_not_a_task_yet() -> None:
    work = Work()
    with closing(TaskManager()) as tasks:
        waiting = asyncio.ensure_future(tasks.execute(work(), "report"))
        await until(lambda: work.begun)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: work.cancelled)


# ── what goes on ──


async def test_work_that_takes_longer_goes_on_as_a_task(tasks: TaskManager, clock: Clock) -> None:
    work = Work()
    task_id = await begin(tasks, work)
    assert not work.cancelled
    assert task_of(tasks, task_id) == Task(task_id, "report", "ann", clock.now, channel_id="#c", platform="matrix")
    clock.now += 20
    work.go.set()
    task = await awaited(tasks, task_id)
    assert (task.status, task.text, task.ended) == (Status.COMPLETED, "done", clock.now)
    assert task_of(tasks, task_id) == task


async def test_work_that_fails_later_says_why(tasks: TaskManager) -> None:
    for answer, error in (
        (ValueError("no page 7"), "ValueError: no page 7"),
        (object(), "TypeError: output is of type"),
    ):
        work = Work()
        task_id = await begin(tasks, work, answer=answer)
        work.go.set()
        task = await awaited(tasks, task_id)
        assert task.status is Status.FAILED
        assert task.error.startswith(error)


async def test_a_failed_result_of_a_call_is_a_failed_task(tasks: TaskManager) -> None:
    work = Work()
    task_id = await begin(tasks, work, answer=Result(is_error=True, error=CallError(Code.UNAVAILABLE, "it is gone")))
    work.go.set()
    assert (await awaited(tasks, task_id)).text == "it is gone"


async def test_work_that_is_cancelled_from_inside_has_failed(tasks: TaskManager) -> None:
    work = Work()
    task_id = await begin(tasks, work, answer=asyncio.CancelledError())
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    other = json.loads(await tasks.execute(future, "report"))["task_id"]
    future.cancel()
    assert "its work was cancelled" in (await awaited(tasks, other)).text
    assert tasks.cancel(task_id)


async def test_a_wait_that_ends_leaves_the_task_alone(tasks: TaskManager) -> None:
    work = Work()
    task_id = await begin(tasks, work)
    for timeout in (0.001, 0, -5, float("nan")):
        task = await tasks.await_result(task_id, timeout)
        assert task is not None
        assert task.running
    waiting = asyncio.ensure_future(tasks.await_result(task_id))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not tasks._work[task_id].waiters
    assert task_of(tasks, task_id).running
    assert not work.cancelled


async def test_a_wait_ends_at_its_limit() -> None:
    with closing(TaskManager(0, max_wait_seconds=0.001)) as tasks:
        task = await tasks.await_result(await begin(tasks, Work()), 1e9)
    assert task is not None
    assert task.running


async def test_a_task_ends_at_its_limit_and_so_does_its_work() -> None:
    work = Work()
    with closing(TaskManager(0, task_seconds=0.02)) as tasks:
        task = await awaited(tasks, await begin(tasks, work))
        await until(lambda: work.cancelled)
    assert task.error == "it did not end within 0.02 s (limit task_seconds) and was cancelled"


# ── whose they are ──


async def test_another_owners_task_is_treated_like_an_unknown_id(tasks: TaskManager) -> None:
    work = Work()
    task_id = await begin(tasks, work, "ann")
    for user_id in ("bob", ""):
        assert tasks.get_result(task_id, user_id) is None
        assert await tasks.await_result(task_id, WAIT_SECONDS, user_id) is None
        assert tasks.cancel(task_id, user_id) is False
        assert tasks.set_output_redirect(task_id, print, user_id) is False
        assert tasks.list_tasks(user_id) == []
    assert not work.cancelled
    assert task_of(tasks, task_id, "ann").running


async def test_a_user_sees_his_tasks_newest_first(tasks: TaskManager) -> None:
    works = [Work() for _ in range(3)]
    ids = [await begin(tasks, work) for work in works]
    works[2].go.set()
    await awaited(tasks, ids[2])
    assert [task.task_id for task in tasks.list_tasks("ann")] == [ids[1], ids[0], ids[2]]


# ── cancelling ──


async def test_a_cancelled_task_has_failed_at_once_and_its_work_is_cancelled(tasks: TaskManager) -> None:
    work = Work()
    task_id = await begin(tasks, work)
    waiting = asyncio.ensure_future(tasks.await_result(task_id))
    await asyncio.sleep(0)
    assert tasks.cancel(task_id, "ann") is True
    task = task_of(tasks, task_id)
    assert (task.status, task.error.partition(":")[0]) == (Status.CANCELLED, "cancelled")
    assert await waiting == task
    await until(lambda: work.cancelled)
    assert tasks.cancel(task_id) is False
    assert tasks.cancel("task_never") is False
    assert task_of(tasks, task_id) == task


# ── limits ──


async def test_above_the_limit_of_tasks_the_work_is_awaited() -> None:
    with closing(TaskManager(SOON, running=2, running_per_owner=1)) as tasks:
        await begin(tasks, Work(), "ann")
        second = Work()
        waiting = asyncio.ensure_future(tasks.execute(second("second"), "report", "ann"))
        await begin(tasks, Work(), "bob")
        third = Work()
        cancelled = asyncio.ensure_future(tasks.execute(third(), "report", "eve"))
        await until(lambda: third.begun)
        cancelled.cancel()
        await until(lambda: third.cancelled)
        second.go.set()
        assert await waiting == "second"


async def test_work_without_room_ends_at_the_limit_too() -> None:
    work = Work()
    with closing(TaskManager(0, running=0, task_seconds=0.01)) as tasks:
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            await tasks.execute(work(), "report")
        await until(lambda: work.cancelled)


async def test_finished_tasks_go_after_their_time(tasks: TaskManager, clock: Clock) -> None:
    work = Work()
    task_id = await begin(tasks, work)
    work.go.set()
    await awaited(tasks, task_id)
    clock.now += 86_399
    assert tasks.get_result(task_id) is not None
    clock.now += 1
    assert tasks.get_result(task_id) is None
    assert tasks.list_tasks("ann") == []


async def test_the_newest_finished_task_evicts_the_oldest_and_waiters_still_get_theirs() -> None:
    with closing(TaskManager(SOON, finished_kept=0)) as tasks:
        work = Work()
        task_id = await begin(tasks, work)
        waiting = asyncio.ensure_future(tasks.await_result(task_id))
        await asyncio.sleep(0)
        work.go.set()
        task = await waiting
        assert task is not None
        assert task.text == "done"
        assert tasks.get_result(task_id) is None


@pytest.mark.parametrize("name", ["timeout", "task_seconds", "finished_kept", "result_bytes"])
def test_a_limit_that_cannot_be_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -1, it must be a number of at least 0"):
        TaskManager(**{name: -1})  # type: ignore[arg-type]


# ── notifications ──


async def test_subscribers_get_their_tasks_until_they_unsubscribe(
    tasks: TaskManager, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[str, str]] = []

    def broken(task: Task) -> None:
        raise RuntimeError("no")

    tasks.subscribe(broken)
    leave = tasks.subscribe(lambda task: calls.append(("all", task.owner)))
    tasks.subscribe(lambda task: calls.append(("ann's", task.owner)), "ann")
    with caplog.at_level(logging.ERROR):
        for user_id in ("ann", "bob"):
            assert tasks.cancel(await begin(tasks, Work(), user_id))
    leave()
    leave()
    tasks.cancel(await begin(tasks, Work(), "bob"))
    assert calls == [("all", "ann"), ("ann's", "ann"), ("all", "bob")]
    assert "a callback failed for <Task" in caplog.text


async def test_events_hear_of_each_task_from_when_they_are_made_until_the_end(clock: Clock) -> None:
    tasks = TaskManager(SOON, clock=clock)
    events, anns = tasks.events(), tasks.events("ann")
    async with tasks.events() as left:
        pass
    ids = [await begin(tasks, Work(), user_id) for user_id in ("ann", "bob")]
    assert tasks.cancel(ids[0])
    async with asyncio.timeout(WAIT_SECONDS):
        assert (await anext(events)).task_id == ids[0]
        tasks.close()
        assert [task.task_id async for task in events] == [ids[1]]
        assert [task.task_id async for task in anns] == [ids[0]]
        assert [task async for task in left] == []
        assert [task async for task in tasks.events()] == []


async def test_events_without_results_hold_no_results_for_a_slow_reader(tasks: TaskManager) -> None:
    work = Work()
    async with tasks.events(results=False) as events:
        task_id = await begin(tasks, work)
        work.go.set()
        assert (await awaited(tasks, task_id)).result is not None
        async with asyncio.timeout(WAIT_SECONDS):
            event = await anext(events)
    assert (event.task_id, event.status, event.result) == (task_id, Status.COMPLETED, None)


async def test_a_result_is_sent_on_when_it_is_there(tasks: TaskManager) -> None:
    async with Receiver() as receiver:
        work, delivered = Work(), list[Task]()
        task_id = await begin(tasks, work)
        assert tasks.set_output_redirect(task_id, delivered.append)
        assert tasks.set_output_redirect(task_id, receiver.url, "ann")
        work.go.set()
        await awaited(tasks, task_id)
        await until(lambda: bool(receiver.posts))
        assert receiver.posts[0][1]["text"] == "done"
        assert delivered == []  # the later target took its place
        assert tasks.set_output_redirect(task_id, delivered.append)
        assert delivered == [task_of(tasks, task_id)]
        assert tasks.set_output_redirect(task_id, None)
        assert not tasks.set_output_redirect("task_never", print)
    with pytest.raises(ValueError, match="leads away from this machine"):
        tasks.set_output_redirect(task_id, "http://example.com/")


# ── threads and loops ──


async def test_loops_of_other_threads_wait_for_the_same_task(tasks: TaskManager) -> None:
    work = Work()
    task_id = await begin(tasks, work)
    texts: list[str] = []
    waiting = threading.Barrier(4)

    async def wait() -> None:
        waiting.wait(WAIT_SECONDS)
        task = await tasks.await_result(task_id, WAIT_SECONDS)
        assert task is not None
        texts.append(task.text)

    threads = [threading.Thread(target=lambda: asyncio.run(wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(waiting.wait, WAIT_SECONDS)
    await until(lambda: len(tasks._work[task_id].waiters) == 3)
    work.go.set()
    for thread in threads:
        await asyncio.to_thread(thread.join, WAIT_SECONDS)
    assert texts == ["done"] * 3


async def test_work_of_another_loop_is_cancelled_there(tasks: TaskManager) -> None:
    ids: list[str] = []
    cancelled: list[bool] = []

    async def elsewhere() -> None:
        work = Work()
        ids.append(await begin(tasks, work))
        await until(lambda: work.cancelled)
        cancelled.append(True)

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    await until(lambda: bool(ids))
    assert tasks.cancel(ids[0])
    await asyncio.to_thread(thread.join, WAIT_SECONDS)
    assert cancelled == [True]


def test_work_whose_loop_ends_has_failed_and_waiters_of_a_closed_loop_are_ignored(tasks: TaskManager) -> None:
    task_id = asyncio.run(begin(tasks, Work()))
    assert "the event loop that ran it has ended" in task_of(tasks, task_id).text

    loop = asyncio.new_event_loop()
    waiter: asyncio.Future[Task] = loop.create_future()
    events = loop.run_until_complete(_events(tasks))
    other = loop.run_until_complete(begin(tasks, Work()))
    tasks._work[other].waiters.add(waiter)
    left = asyncio.all_tasks(loop)
    loop.close()
    assert tasks.cancel(other)
    assert task_of(tasks, other).status is Status.CANCELLED
    events.close()
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


async def _events(tasks: TaskManager) -> TaskEvents:
    return tasks.events()
