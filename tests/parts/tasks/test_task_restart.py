# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.parts.tasks.samples import Clock, running
from tests.parts.tasks.task_cases import SOON, Work, awaited, begin, clock, task_of, tasks
from tests.support.waiting import WAIT_SECONDS, until, within
from toolbus.bus.storage.store import Kind, MemoryDriver, Store, WriteFailed
from toolbus.errors import SetupError
from toolbus.parts.tasks import Status, TaskManager, room
from toolbus.parts.tasks.task_store import TaskStore
from toolbus.protocol.tool import KIB
from toolbus.testing import running_bus

# ── restarts ──


async def test_what_has_ended_is_there_after_a_restart_and_what_ran_has_failed(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "tasks.db"
    with closing(TaskManager(SOON, path=path, clock=clock)) as tasks:
        done, cut_off = Work(), Work()
        first, second = await begin(tasks, done), await begin(tasks, cut_off)
        done.go.set()
        task = await awaited(tasks, first)
    await until(lambda: cut_off.cancelled)
    with closing(TaskManager(path=path, clock=clock)) as tasks:
        assert task_of(tasks, first, "ann") == task
        assert "the program that ran it ended before it was done" in task_of(tasks, second, "ann").text
        assert "it may have run, so it was not tried again" in task_of(tasks, second, "ann").text
        assert tasks.get_result(first, "bob") is None


def test_what_ran_when_a_program_was_killed_has_failed_at_the_next_start(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "tasks.db"
    with closing(TaskStore(path, KIB)) as store:
        store.put(running())
    for _ in range(2):
        with closing(TaskManager(path=path, clock=clock)) as tasks:
            task = task_of(tasks, "task_1", "ann")
            assert (task.status, task.ended) == (Status.FAILED, clock.now)
            assert "the program that ran it ended" in task.text


async def test_what_is_dropped_or_too_old_is_not_there_after_a_restart_either(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "tasks.db"
    ids = []
    with closing(TaskManager(SOON, path=path, clock=clock, finished_kept=2)) as tasks:
        for _ in range(3):
            ids.append(await begin(tasks, Work()))
            clock.now += 10
            assert tasks.cancel(ids[-1])
    with closing(TaskManager(path=path, clock=clock, finished_kept=2)) as tasks:
        assert [task.task_id for task in tasks.list_tasks("ann")] == [ids[2], ids[1]]
    with closing(TaskManager(path=path, clock=clock, finished_kept=1)) as tasks:
        assert [task.task_id for task in tasks.list_tasks("ann")] == [ids[2]]
    with closing(TaskManager(path=path, clock=clock, monotonic=clock)) as tasks:
        clock.now += 86_400
        assert tasks.list_tasks("ann") == []
    with closing(TaskManager(path=path, clock=clock)) as tasks:
        assert tasks.list_tasks("ann") == []


@pytest.mark.parametrize("wrong", [60 * 86_400, -60 * 86_400])
async def test_a_wrong_clock_drops_no_result_at_a_start_or_while_it_runs(
    tmp_path: Path, clock: Clock, wrong: float
) -> None:
    path, work = tmp_path / "tasks.db", Work()
    with closing(TaskManager(SOON, path=path, clock=clock)) as tasks:
        task_id = await begin(tasks, work)
        work.go.set()
        done = await awaited(tasks, task_id)
        clock.now += wrong
        assert task_of(tasks, task_id, "ann") == done
    for _ in range(2):
        with closing(TaskManager(path=path, clock=clock)) as tasks:
            assert task_of(tasks, task_id, "ann") == done
            assert tasks.list_tasks("ann")


async def test_a_large_result_is_there_until_the_restart(tmp_path: Path) -> None:
    path, work = tmp_path / "tasks.db", Work()
    with closing(TaskManager(SOON, path=path, result_bytes=100)) as tasks:
        task_id = await begin(tasks, work, answer="x" * 200)
        work.go.set()
        assert (await awaited(tasks, task_id)).text == "x" * 200
    with closing(TaskManager(path=path)) as tasks:
        assert (
            "its result of 202 bytes was dropped: it is larger than the limit result_bytes"
            in task_of(tasks, task_id).text
        )


async def test_a_file_that_is_named_later_takes_in_what_there_is(tmp_path: Path, tasks: TaskManager) -> None:
    path = tmp_path / "tasks.db"
    with closing(TaskManager(SOON, path=path)) as before:
        old = await begin(before, Work())
    ids = [await begin(tasks, Work()), await begin(tasks, Work())]
    tasks.cancel(ids[0])
    tasks.persist_in(path)
    assert {task.task_id for task in tasks.list_tasks("ann")} == {old, *ids}
    with pytest.raises(SetupError, match=r"are persisted in .*tasks\.db already"):
        tasks.persist_in(tmp_path / "other.db")
    tasks.close()
    with closing(TaskManager(path=path, clock=Clock())) as again:
        assert {task.task_id for task in again.list_tasks("ann")} == {old, *ids}


class HangingStore(Store):
    """A store that loads only when a test says so."""

    def __init__(self) -> None:
        super().__init__(MemoryDriver())
        self.loads, self.go = threading.Event(), threading.Event()

    def load(self, kind: Kind) -> dict[str, Any]:
        self.loads.set()
        self.go.wait(WAIT_SECONDS)
        return super().load(kind)


async def test_tasks_can_be_used_while_a_database_that_hangs_is_read(tasks: TaskManager) -> None:
    store = HangingStore()
    restoring = asyncio.create_task(asyncio.to_thread(tasks.persist_in, store))
    try:
        await until(store.loads.is_set)
        assert await within(asyncio.to_thread(tasks.get_result, "task_1"), WAIT_SECONDS / 4) is None
    finally:
        store.go.set()
        await within(restoring)


async def test_a_database_that_is_read_when_tasks_are_closed_already_gets_no_thread_that_nobody_ends(
    tasks: TaskManager,
) -> None:
    store, before = HangingStore(), set(threading.enumerate())
    restoring = asyncio.create_task(asyncio.to_thread(tasks.persist_in, store))
    try:
        await until(store.loads.is_set)
        await within(asyncio.to_thread(tasks.close), WAIT_SECONDS / 4)
    finally:
        store.go.set()
        await within(restoring)
    assert "toolbus-tasks-store" not in {each.name for each in set(threading.enumerate()) - before}


async def test_why_tasks_are_not_restored_is_logged_once_and_they_are_when_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [WriteFailed("it is away"), SetupError("a row is damaged"), SetupError("a row is damaged")]
    persist_in, restored = TaskManager.persist_in, threading.Event()

    def persist(manager: TaskManager, place: Store | Path) -> None:
        if errors:
            raise errors.pop(0)
        persist_in(manager, place)
        restored.set()

    monkeypatch.setattr(TaskManager, "persist_in", persist)
    monkeypatch.setattr(room, "AGAIN_SECONDS", 0.001)
    with caplog.at_level(logging.ERROR, "toolbus.tasks"):
        async with running_bus(data_dir=tmp_path):
            await until(restored.is_set)
    assert [line for line in caplog.messages if "neither restored nor persisted" in line] == [
        "tasks are neither restored nor persisted until this is repaired: a row is damaged"
    ]


# ── the end ──


async def test_closing_ends_all_work_and_what_comes_later_is_waited_for(tasks: TaskManager) -> None:
    work, later = Work(), Work()
    task_id = await begin(tasks, work)
    tasks.close()
    tasks.close()
    await until(lambda: work.cancelled)
    assert task_of(tasks, task_id).status is Status.FAILED
    later.go.set()
    assert await tasks.execute(later(), "report", "ann") == "done"


def test_nothing_is_made_for_a_program_that_keeps_nothing() -> None:
    before = threading.active_count()
    with closing(TaskManager()):
        assert threading.active_count() == before
