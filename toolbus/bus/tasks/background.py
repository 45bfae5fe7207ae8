"""The tasks of one dispatcher: what its calls become, and the way back by which they are cancelled.

A TaskManager may serve several dispatchers, each on a loop of its own, and is itself used from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from toolbus.bus.tasks.task_caller import TaskCaller
from toolbus.bus.tasks.task_manager import TaskManager
from toolbus.tool import Result
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.bus.calls.call import Call
    from toolbus.bus.calls.dispatcher import Dispatcher


class LoopTasks:
    """Keeps the calls of one dispatcher that outlive their caller's patience (`toolbus.bus.calls.call.Background`).

    Args:
        loop: returns the loop that the dispatcher belongs to; None while it is not started.
    """

    def __init__(
        self, tasks: TaskManager, dispatcher: Dispatcher, loop: Callable[[], asyncio.AbstractEventLoop | None]
    ) -> None:
        self._tasks = tasks
        self._dispatcher = dispatcher
        self._loop = loop

    def adopt(self, call: Call, now: float) -> tuple[TaskCaller, str, Result] | None:
        """Takes over a running call: `TaskManager.adopt`."""
        return self._tasks.adopt(call, now, self._cancel_soon)

    def _cancel_soon(self, caller: TaskCaller, task_id: str) -> None:
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed, and its calls have ended
                loop.call_soon_threadsafe(self._cancel, caller, task_id)

    def _cancel(self, caller: TaskCaller, task_id: str) -> None:
        cancel = pb.ToolCancel(call_id=task_id, reason="the task was cancelled")
        self._dispatcher.cancels(caller, [cancel], time.monotonic())
