"""Who is told when a task is done: callbacks, and streams of finished tasks for coroutines of any loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Self

from toolbus.bus.tasks.task import Task

log = logging.getLogger("toolbus.tasks")

OnFinished = Callable[[Task], object]

EVENTS_WAITING = 1_000  # finished tasks that a stream holds for a reader who does not come; as many as may run


class TaskWatchers:
    """Callbacks for finished tasks; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, tuple[OnFinished, str | None]] = {}  # with whose tasks it hears of

    def add(self, callback: OnFinished, owner: str | None) -> Callable[[], None]:
        """Has a callback told from now on. Returns what ends that."""
        key = object()  # the same callback may be there twice
        with self._lock:
            self._callbacks[key] = (callback, owner)

        def remove() -> None:
            with self._lock:
                self._callbacks.pop(key, None)

        return remove

    def tell(self, task: Task) -> None:
        """Tells everybody whom it concerns."""
        with self._lock:
            concerned = [callback for callback, owner in self._callbacks.values() if owner in (None, task.owner)]
        for callback in concerned:
            run_callback(callback, task)


class TaskEvents:
    """Finished tasks as they come: `async for task in events`. Belongs to the loop that it was made on.

    It hears of tasks from the moment it is made, and ends when it is closed or the TaskManager is. A reader who
    falls behind by `EVENTS_WAITING` loses the oldest.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Task] = deque(maxlen=EVENTS_WAITING)
        self._changed = asyncio.Event()
        self._closed = False
        self._leave: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<TaskEvents waiting={len(self._waiting)}{' closed' if self._closed else ''}>"

    def listen(self, leave: Callable[[], None]) -> None:
        """Says how it is ended; whoever made it does."""
        self._leave = leave

    def put(self, task: Task) -> None:
        """Takes a finished task, on any thread."""
        self._waiting.append(task)
        self._wake()

    def close(self) -> None:
        """Ends it once what waits is read, on any thread; may be called again."""
        self._closed = True
        self._leave()
        self._wake()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Task:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            if not self._waiting and not self._closed:  # it may have come between the look and the clearing
                await self._changed.wait()
        return self._waiting.popleft()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:  # its loop is closed, and so is whoever read
            pass


def run_callback(callback: OnFinished, task: Task) -> None:
    """Tells one callback; what it raises is logged, and disturbs nobody else."""
    try:
        callback(task)
    except Exception:
        log.exception("a callback failed for %r", task)
