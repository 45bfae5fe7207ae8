"""Notifies callbacks and event streams when a task ends, from whatever thread it ended on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from toolbus.bus.tasks.task import Task
from toolbus.mailbox import Mailbox

log = logging.getLogger("toolbus.tasks")

OnFinished = Callable[[Task], object]

MAX_WAITING = 1_000  # finished tasks that a stream holds for a slow reader; as many as may run


class TaskWatchers:
    """Callbacks for finished tasks; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, tuple[OnFinished, str | None]] = {}  # with the owner; None: all owners

    def add(self, callback: OnFinished, owner: str | None) -> Callable[[], None]:
        """Calls a callback for each task that ends from now on. Returns the function that unsubscribes it."""
        key = object()  # the same callback may be subscribed twice
        with self._lock:
            self._callbacks[key] = (callback, owner)

        def remove() -> None:
            with self._lock:
                self._callbacks.pop(key, None)

        return remove

    def notify(self, task: Task) -> None:
        """Calls the callbacks that follow this task's owner, or all owners."""
        with self._lock:
            callbacks = [callback for callback, owner in self._callbacks.values() if owner in (None, task.owner)]
        for callback in callbacks:
            run_callback(callback, task)


class TaskEvents(Mailbox[Task]):
    """Finished tasks as they come: `async for task in events`. Belongs to the loop that it was made on.

    It holds tasks from the moment it is made, and ends when it is closed or the TaskManager is. A reader that falls
    behind by `MAX_WAITING` tasks loses the oldest.
    """

    def __init__(self, on_close: Callable[[], object]) -> None:
        super().__init__(MAX_WAITING, on_close=on_close)


def run_callback(callback: OnFinished, task: Task) -> None:
    """Calls one callback; an exception is logged, so that the other callbacks still run."""
    try:
        callback(task)
    except Exception:
        log.exception("a callback failed for %r", task)
