from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.parts.tasks.samples import Clock
from tests.support.waiting import WAIT_SECONDS
from toolbus.parts.tasks import Task, TaskManager

SOON = 0.001  # a soft timeout that passes at once


class Work:
    """Work that ends when a test says so."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun = False
        self.cancelled = False

    async def __call__(self, answer: Any = "done") -> Any:
        self.begun = True
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tasks(clock: Clock) -> Iterator[TaskManager]:
    with closing(TaskManager(SOON, clock=clock, monotonic=clock)) as manager:
        yield manager


async def begin(tasks: TaskManager, work: Work, user_id: str = "ann", answer: Any = "done") -> str:
    """Has some work become a task. Returns its id."""
    answer_json = json.loads(await tasks.execute(work(answer), "report", user_id, "#c", "matrix"))
    assert answer_json["status"] == "running"
    return str(answer_json["task_id"])


def task_of(tasks: TaskManager, task_id: str, user_id: str | None = None) -> Task:
    task = tasks.get_result(task_id, user_id)
    assert task is not None
    return task


async def awaited(tasks: TaskManager, task_id: str) -> Task:
    task = await tasks.await_result(task_id, WAIT_SECONDS)
    assert task is not None
    assert not task.running
    return task
