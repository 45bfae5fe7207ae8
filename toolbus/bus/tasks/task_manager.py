"""Work that outlives its caller's patience: begun here, kept here, asked for later.

Work comes in two ways. The dispatcher hands over a call that is still running at its soft timeout (`adopt`). A program
has an awaitable of its own run (`execute`), as Stargazer's programs do. Either way a task ends once: with a result, in
failure, cancelled, or at its limit.

One lock guards the ledger and what stands behind running tasks. Nothing of others' is called while it is held, and
nobody waits for the disk (`store`), so every method but the constructor and `close` may be called on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolbus.bus.tasks.delivery import Delivery, Target, target_of
from toolbus.bus.tasks.task import (
    CANCELLED,
    ENDED_WITH_PROCESS,
    Task,
    compact,
    envelope,
    new_id,
    result_of,
    sentence,
    text_of,
)
from toolbus.bus.tasks.task_caller import TaskCaller, owner_of_call
from toolbus.bus.tasks.task_index import TaskIndex, TaskLimits, check_limit
from toolbus.bus.tasks.task_store import TaskStore
from toolbus.bus.tasks.task_watchers import OnFinished, TaskEvents, TaskWatchers
from toolbus.errors import SetupError
from toolbus.tool import MAX_TIMEOUT_SECONDS, Result
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.bus.calls.call import Call, CancelCalls

log = logging.getLogger("toolbus.tasks")

SOFT_SECONDS = 10.0  # how long a caller waits before its call becomes a task
DEFAULTS = TaskLimits()


@dataclass(slots=True)
class _Work:
    """What stands behind a running task."""

    stop: Callable[[], None]  # has it end, from any thread; may come after it has ended
    caller: TaskCaller | None = None  # who takes its result; None where `execute` does
    target: Target | None = None  # where its result is sent by itself; None: nowhere
    waiters: set[asyncio.Future[Task]] = field(default_factory=set)


class TaskManager:
    """The tasks of one bus, or of one program. Safe from any thread.

    Owners are checked where ``user_id`` is given (None: not): somebody else's task is as if there were none.

    Args:
        timeout: how long `execute` waits before work becomes a task. It ends no work.
        path: an SQLite file for what survives a restart; None: nothing does.
        task_seconds, finished_kept, finished_seconds, result_bytes, running, running_per_owner: as in `TaskLimits`.
        clock: seconds since the epoch.

    Raises:
        ValueError: from the constructor; the timeout or a limit is no number, or below 0.
        SetupError: from the constructor; the file cannot be used.
    """

    def __init__(
        self,
        timeout: float = SOFT_SECONDS,
        *,
        path: Path | None = None,
        task_seconds: float = DEFAULTS.task_seconds,
        finished_kept: int = DEFAULTS.finished_kept,
        finished_seconds: float = DEFAULTS.finished_seconds,
        result_bytes: int = DEFAULTS.result_bytes,
        running: int = DEFAULTS.running,
        running_per_owner: int = DEFAULTS.running_per_owner,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_limit("timeout", timeout)
        self.timeout = timeout
        self.limits = TaskLimits(
            task_seconds=task_seconds,
            running=running,
            running_per_owner=running_per_owner,
            finished_kept=finished_kept,
            finished_seconds=finished_seconds,
            result_bytes=result_bytes,
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._index = TaskIndex(self.limits)
        self._work: dict[str, _Work] = {}  # by task_id, as long as it runs
        self._watchers = TaskWatchers()
        self._events: set[TaskEvents] = set()  # streams that nobody has closed
        self._delivery = Delivery()
        self._closed = False
        self._store: TaskStore | None = None  # what survives a restart; None: nothing does
        if path is not None:
            self.keep_in(path)

    def __repr__(self) -> str:
        return f"<TaskManager {self._index!r}{' closed' if self._closed else ''}>"

    def keep_in(self, path: Path) -> None:
        """Keeps tasks in an SQLite file from now on, and takes in what it holds; blocks for as long as that takes.

        A task that was running when the file was last written has failed: its program has ended.

        Raises:
            SetupError: the file cannot be used, or there is one already.
        """
        if self._store is not None:
            raise SetupError(f"tasks are kept in {self._store.path} already, not in {path}: name one file")
        store, now = TaskStore(path, self.limits.result_bytes), self._clock()
        changed, dropped = [], []
        with self._lock:
            here = self._index.all()
            for task in store.load():
                kept = task.with_error(ENDED_WITH_PROCESS, now) if task.running else task
                ended, gone = self._index.end(kept)
                if ended is not task:
                    changed.append(ended)
                dropped += gone
            for task in (*here, *changed):
                store.put(task)
            store.remove(dropped)
            self._store = store
            self._expire()

    # -- the two ways in -----------------------------------------------------------------------------------------

    def adopt(self, call: Call, now: float, cancel: CancelCalls | None = None) -> tuple[TaskCaller, str, Result] | None:
        """Takes over a running call.

        Args:
            now: by the clock of the dispatcher, as the call's times are.
            cancel: the `cancels` of the call's dispatcher, called on the loop that runs now, perhaps when the call has
                ended. None, or no loop: a cancelled task only lets go of its call.

        Returns:
            The call's caller from now on, its call_id there, and what its caller so far is answered; None where there
            is no room for another task.
        """
        started = self._clock() - (now - call.started)
        task = Task(new_id(), call.entry.name, owner_of_call(call), started)
        caller = TaskCaller(call.caller.source, call.caller.budget, self._ended_with)

        try:
            loop = weakref.ref(asyncio.get_running_loop())  # a program may end it long before the task
        except RuntimeError:
            loop = None

        def stop() -> None:
            here = loop() if loop is not None else None
            if here is not None and cancel is not None:
                message = pb.ToolCancel(call_id=task.task_id, reason="the task was cancelled")
                with contextlib.suppress(RuntimeError):  # it is closed, and its calls have ended
                    here.call_soon_threadsafe(lambda: cancel(caller, [message], time.monotonic()))

        if not self._begin(task, _Work(stop, caller)):
            return None
        return caller, task.task_id, Result(call.call_id, compact(envelope(task)))

    async def execute(
        self, awaitable: Awaitable[Any], tool_name: str, user_id: str = "", channel_id: str = "", platform: str = ""
    ) -> str:
        """Runs some work; what takes longer than ``timeout`` goes on as a task.

        Cancelling this cancels the work, unless it has become a task. Where there is no room for another task, this
        waits for the work however long it takes.

        Returns:
            The work's result, a text as it is and all else as compact JSON; or the envelope of the task, as JSON.

        Raises:
            TimeoutError: it did not end within ``task_seconds``, and never became a task.
            Exception: whatever the work raised before it became a task.
            TypeError: JSON cannot hold what it returned.
        """
        loop = asyncio.get_running_loop()
        begun, started = loop.time(), self._clock()
        end = begun + self.limits.task_seconds
        work = asyncio.ensure_future(awaitable)
        if not await _ends_within(work, min(self.timeout, self.limits.task_seconds)):
            task = Task(new_id(), tool_name, user_id, started, channel_id=channel_id, platform=platform)
            if self._detach(task, work, end):
                return compact(envelope(task))
            if not await _ends_within(work, end - loop.time()):
                _cancel(work)
                raise TimeoutError(self._too_long())
        value = work.result()
        return value if isinstance(value, str) else text_of(result_of(value))

    def _detach(self, task: Task, work: asyncio.Future[Any], end: float) -> bool:
        """Has some work go on as a task; returns False where there is no room."""
        loop = work.get_loop()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # its loop is closed, and the work with it
                loop.call_soon_threadsafe(_cancel, work)

        if not self._begin(task, _Work(stop)):
            return False
        timer = loop.call_at(end, self._end, task.task_id, None, self._too_long())
        work.add_done_callback(functools.partial(self._worked, task.task_id, timer))
        return True

    def _worked(self, task_id: str, timer: asyncio.TimerHandle, work: asyncio.Future[Any]) -> None:
        timer.cancel()
        if work.cancelled():
            self._end(task_id, error="its work was cancelled, or the event loop that ran it has ended")
        elif (problem := work.exception()) is not None:
            self._end(task_id, error=sentence(problem))
        else:
            try:
                self._ended_with(task_id, result_of(work.result()))
            except TypeError as refused:  # JSON cannot hold it
                self._end(task_id, error=sentence(refused))

    def _too_long(self) -> str:
        return f"it did not end within {self.limits.task_seconds:g} s (limit task_seconds) and was taken back"

    # -- asking --------------------------------------------------------------------------------------------------

    def get_result(self, task_id: str, user_id: str | None = None) -> Task | None:
        """Returns a task as it is now; None where there is none, or none of this user."""
        with self._lock:
            self._expire()
            task = self._index.find(task_id, user_id)
            return None if task is None else self._now(task)

    async def await_result(
        self, task_id: str, timeout: float = MAX_TIMEOUT_SECONDS, user_id: str | None = None
    ) -> Task | None:
        """Waits until a task is done. One that still runs after so many seconds (300 at most) goes on.

        Returns:
            The task as it then is; None where there is none, or none of this user.
        """
        waiter: asyncio.Future[Task] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._expire()
            task = self._index.find(task_id, user_id)
            if task is None or not task.running:
                return task
            waiters = self._work[task_id].waiters
            waiters.add(waiter)
        try:
            # Not below 0, and not NaN either.
            await asyncio.wait([waiter], timeout=min(timeout, MAX_TIMEOUT_SECONDS) if timeout > 0 else 0)
        finally:
            with self._lock:
                waiters.discard(waiter)
        return waiter.result() if waiter.done() else self.get_result(task_id, user_id)

    def now(self) -> float:
        """Returns the time, by the clock that the tasks' times are of."""
        return self._clock()

    def list_tasks(self, user_id: str) -> list[Task]:
        """Returns a user's tasks: those that run, then the finished ones, each newest first."""
        with self._lock:
            self._expire()
            return [self._now(task) for task in self._index.of(user_id)]

    def cancel(self, task_id: str, user_id: str | None = None) -> bool:
        """Ends a task as failed, at once, and its work as soon as that can be. Returns whether it was running."""
        with self._lock:
            task = self._index.find(task_id, user_id)
        return task is not None and task.running and self._end(task_id, error=CANCELLED)

    # -- being told ----------------------------------------------------------------------------------------------

    def subscribe(self, callback: OnFinished, user_id: str | None = None) -> Callable[[], None]:
        """Has a function told of each task that ends from now on; returns what ends that.

        It is called with the task, on the thread on which that ended, perhaps on the bus's loop: it must not block.
        """
        return self._watchers.add(callback, user_id)

    def events(self, user_id: str | None = None, *, results: bool = True) -> TaskEvents:
        """Returns a stream of the tasks that end from now on, for the running loop: ``async for task in events``.

        Args:
            results: whether they come with their results, which a reader who falls behind then holds in memory.
        """

        def put(task: Task) -> None:
            events.put(task if results else dataclasses.replace(task, result=None))

        def unsubscribe() -> None:
            remove()
            with self._lock:
                self._events.discard(events)

        events = TaskEvents(unsubscribe)
        remove = self._watchers.add(put, user_id)
        with self._lock:
            self._events.add(events)
            closed = self._closed
        if closed:
            events.close()
        return events

    def set_output_redirect(self, task_id: str, target: str | OnFinished | None, user_id: str | None = None) -> bool:
        """Has a task's result sent on by itself when it ends, or at once where it has ended. The last target counts.

        A redirect ends with the process.

        Args:
            target: a function, called with the task as that of `subscribe` is; a URL of this machine, which gets a POST
                with `task_id`, `tool`, `status`, `text` and `truncated`; None for none.

        Returns:
            False where there is no such task, or none of this user.

        Raises:
            ValueError: the URL does not lead to this machine.
            TypeError: the target is neither a URL nor a plain function.
        """
        checked = None if target is None else target_of(target)
        with self._lock:
            task = self._index.find(task_id, user_id)
            if task is None:
                return False
            if task.running:
                self._work[task_id].target = checked
                return True
        if checked is not None:
            self._delivery.send(task, checked)
        return True

    # -- beginning and ending ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all work and writes what is left; blocks for as long as that takes. What has ended can be asked for."""
        with self._lock:
            self._closed = True
            left, streams = list(self._work), list(self._events)
        for task_id in left:
            self._end(task_id, error=ENDED_WITH_PROCESS)
        for events in streams:
            events.close()
        self._delivery.close()
        if self._store is not None:
            self._store.close()

    def _begin(self, task: Task, work: _Work) -> bool:
        with self._lock:
            if self._closed or not self._index.begin(task):
                return False
            self._work[task.task_id] = work
            self._keep(task)
        return True

    def _ended_with(self, task_id: str, result: Result) -> None:
        self._end(task_id, dataclasses.replace(result, call_id=task_id))

    def _end(self, task_id: str, result: Result | None = None, error: str = "") -> bool:
        """Ends a task, by its result or with an error; returns False, and changes nothing, where it has ended."""
        now = self._clock()
        with self._lock:
            work = self._work.pop(task_id, None)
            task = self._index.find(task_id)
            if work is None or task is None:
                return False
            ended = task.with_error(error, now) if result is None else task.with_result(result, now)
            ended, gone = self._index.end(ended)
            self._keep(ended, gone)
            waiters = list(work.waiters)
        for waiter in waiters:
            _wake(waiter, ended)
        if result is None:
            try:
                work.stop()
            except Exception:
                log.exception("a fault in ending the work of %r", ended)
        self._watchers.notify(ended)
        if work.target is not None:
            self._delivery.send(ended, work.target)
        return True

    def _now(self, task: Task) -> Task:
        """Returns a task with its last sign of life."""
        caller = self._work[task.task_id].caller if task.running else None
        return task if caller is None else dataclasses.replace(task, progress=caller.latest)

    def _expire(self) -> None:
        gone = self._index.expire(self._clock())
        if gone and self._store is not None:
            self._store.remove(gone)

    def _keep(self, task: Task, gone: list[str] | None = None) -> None:
        if self._store is not None:
            self._store.put(task)
            self._store.remove(gone or ())  # its own id may be among them


async def _ends_within(work: asyncio.Future[Any], seconds: float) -> bool:
    """Waits for some work, so long at most; cancelling the wait cancels it."""
    try:
        done, _ = await asyncio.wait([work], timeout=max(0.0, seconds))
    except asyncio.CancelledError:
        _cancel(work)
        raise
    return bool(done)


def _cancel(work: asyncio.Future[Any]) -> None:
    """Cancels some work that nobody waits for any more."""
    work.cancel()
    work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # or asyncio would miss a reader


def _wake(waiter: asyncio.Future[Task], task: Task) -> None:
    def wake() -> None:
        if not waiter.done():
            waiter.set_result(task)

    with contextlib.suppress(RuntimeError):  # its loop is closed, and so is whoever waited
        waiter.get_loop().call_soon_threadsafe(wake)
