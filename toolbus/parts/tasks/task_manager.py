"""Manages background tasks: starts them, holds their results, cancels them and notifies subscribers.

Work comes in two ways. The dispatcher hands over a call that is still running at its soft deadline (`adopt`). A program
passes an awaitable of its own (`execute`), as Stargazer's programs do. Either way a task ends once: with a result, in
failure, cancelled, or at its time limit.

One lock guards the index and the work behind running tasks. No foreign code is called while it is held, and no method
waits for the disk (`task_store`), so every method but the constructor and `close` may be called on an event loop.
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
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolbus.bus.storage.store import Store
from toolbus.common.text import dump_json
from toolbus.errors import SetupError
from toolbus.parts.tasks.delivery import (
    Delivery,
    OnFinished,
    Target,
    TaskCaller,
    TaskEvents,
    TaskWatchers,
    owner_of_call,
    target_of,
)
from toolbus.parts.tasks.task import (
    CANCELLED,
    ENDED_WITH_PROCESS,
    HOME_DIGITS,
    HomeAway,
    Status,
    Task,
    envelope,
    error_text,
    is_of_another,
    new_id,
    result_of,
    text_of,
)
from toolbus.parts.tasks.task_store import TaskStore
from toolbus.protocol.input_requests import InvalidInput, check_answers, read_requests
from toolbus.protocol.tool import KIB, MAX_TIMEOUT_SECONDS, MIB, TASK_SECONDS, Result
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.bus.calls.call import Call, CancelCalls, MakeCalls


# Pure bookkeeping: nothing here waits, locks or reads a clock. A finished task expires when it is too old, or is
# evicted by newer ones; a running task never is.

ACCOUNT_SHARE = 9  # times as many tasks as may still begin, which one account may have running: some stay for others
MAX_OWNER = 512  # characters: users in grants have half as many, and no limit below counts this text


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """How many tasks there may be, and for how long.

    Attributes:
        task_seconds: how long a task may run.
        running, running_per_owner: tasks that may run, in all and of one owner.
        finished_kept: finished tasks that can still be fetched.
        finished_seconds: after which a finished task expires: of the time in which the program ran, from its end or
            from the last start, so that no wrong clock drops a result.
        finished_bytes: of all their results together; 500 of the largest would take 2 GB.
        result_bytes: the largest result that is written to disk.

    Raises:
        ValueError: from the constructor; a limit is not a number, or below 0.
    """

    task_seconds: float = TASK_SECONDS
    running: int = 1_000
    running_per_owner: int = 100
    finished_kept: int = 500
    finished_seconds: float = 86_400.0
    finished_bytes: int = 64 * MIB
    result_bytes: int = 512 * KIB

    def __post_init__(self) -> None:
        for each in fields(self):
            check_limit(each.name, getattr(self, each.name))


class TaskIndex:
    """The tasks of one program."""

    def __init__(self, limits: TaskLimits) -> None:
        self._limits = limits
        self._running: dict[str, Task] = {}  # by task_id, oldest first
        self._per_owner: dict[str, int] = {}  # running tasks by owner, without owners that have none
        self._finished: dict[str, Task] = {}  # by task_id, in the order in which they ended
        self._since: dict[str, float] = {}  # when each of these was added
        self._accounts: dict[str, str] = {}  # whose each task is; "" of those that were restored
        self._finished_bytes = 0

    def __repr__(self) -> str:
        return f"<TaskIndex running={len(self._running)} finished={len(self._finished)} bytes={self._finished_bytes}>"

    def begin(self, task: Task, account: str = "") -> bool:
        """Adds a running task; returns False, and adds nothing, above the limits or where its owner is too long.

        Args:
            account: whose the call is: a source, or an identity that speaks for many users.
        """
        if len(task.owner) > MAX_OWNER:
            return False
        owned = self._per_owner.get(task.owner, 0)
        if len(self._running) >= self._limits.running or owned >= self._limits.running_per_owner:
            return False
        free = self._limits.running - len(self._running)
        if account and sum(self._accounts[each] == account for each in self._running) > ACCOUNT_SHARE * free:
            return False
        self._running[task.task_id] = task
        self._accounts[task.task_id] = account
        self._per_owner[task.owner] = owned + 1
        return True

    def update(self, task: Task) -> None:
        """Puts a running task in the place of its earlier state."""
        self._running[task.task_id] = task

    def end(self, task: Task, now: float) -> tuple[Task, list[str]]:
        """Adds a finished task, whether it ran here or was restored.

        Args:
            now: by the clock of `expire`.

        Returns:
            The task, without its result where that alone is too large; and the ids of evicted tasks, which may be its
            own.
        """
        limits = self._limits
        if self._running.pop(task.task_id, None) is not None:
            self._per_owner[task.owner] -= 1
            if not self._per_owner[task.owner]:
                del self._per_owner[task.owner]
        if task.size > limits.finished_bytes:
            task = task.without_result(f"it is larger than the limit finished_bytes = {limits.finished_bytes}")
        self._accounts.setdefault(task.task_id, "")
        self._finished[task.task_id] = task
        self._since[task.task_id] = now
        self._finished_bytes += task.size
        evicted = []
        while len(self._finished) > limits.finished_kept or self._finished_bytes > limits.finished_bytes:
            evicted.append(self._drop(self._oldest_of_most()))
        return task, evicted

    def expire(self, now: float) -> list[str]:
        """Drops tasks that were added too long ago. Returns their ids."""
        expired = []
        while self._finished and self._since[next(iter(self._finished))] + self._limits.finished_seconds <= now:
            expired.append(self._drop(next(iter(self._finished))))
        return expired

    def find(self, task_id: str, owner: str | None = None) -> Task | None:
        """Returns a task; None where the id is unknown, or the task is another owner's (owner None: not checked)."""
        task = self._running.get(task_id) or self._finished.get(task_id)
        return task if task is not None and owner in (None, task.owner) else None

    def of(self, owner: str | None) -> list[Task]:
        """Returns an owner's tasks, or (None) all: those that run, then the finished ones, each newest first."""
        both = (reversed(self._running.values()), reversed(self._finished.values()))
        return [task for tasks in both for task in tasks if owner in (None, task.owner)]

    def all(self) -> list[Task]:
        """Returns the tasks that run, then the finished ones, each oldest first."""
        return [*self._running.values(), *self._finished.values()]

    def _oldest_of_most(self) -> str:
        """Returns the oldest finished task of the account that has the most of what is too much."""
        by_count, held = len(self._finished) > self._limits.finished_kept, Counter[str]()
        for task_id, task in self._finished.items():
            held[self._accounts[task_id]] += 1 if by_count else task.size
        most = max(held, key=held.__getitem__)
        return next(task_id for task_id in self._finished if self._accounts[task_id] == most)

    def _drop(self, task_id: str) -> str:
        del self._since[task_id], self._accounts[task_id]
        self._finished_bytes -= self._finished.pop(task_id).size
        return task_id


def check_limit(name: str, value: object) -> None:
    """Checks the value of a limit.

    Raises:
        ValueError: it is not a number of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:  # NaN fails this too
        raise ValueError(f"{name} is {value!r}, it must be a number of at least 0: omit it for the default")


INPUT_SECONDS = 3600.0  # how long a task waits for answers: people answer slowly
NO_ANSWERS = f"it asked for input, and not all of it was answered within {INPUT_SECONDS:g} s"


@dataclass(slots=True)
class Work:
    """The work behind a running task.

    Attributes:
        stop: cancels it, from any thread; may be called after it has ended.
        call: the call that it is; None where it is a program's own.
        target: where its result is delivered; None: nowhere.
        waiters: the futures that its end resolves.
        state: the request_state of its tool, for the call with the answers.
        answers: to the questions, so far.
    """

    stop: Callable[[], None]
    call: TaskCall | None = None
    target: Target | None = None
    waiters: set[asyncio.Future[Task]] = field(default_factory=set)
    state: str = ""
    answers: dict[str, Any] = field(default_factory=dict)

    def go_on(self) -> None:
        """Makes the call again with all answers; from any thread."""
        answers, self.answers = self.answers, {}
        if self.call is not None:
            self.call.again(answers, self.state)


class TaskCall:
    """A call that became a task.

    Args:
        caller: receives its result from now on.
        cancel, calls: those of its dispatcher, called on the loop that runs now; None, or no loop: it can neither be
            cancelled nor made again.
    """

    def __init__(
        self, call: Call, task_id: str, caller: TaskCaller, cancel: CancelCalls | None, calls: MakeCalls | None
    ) -> None:
        self.task_id = task_id
        self.caller = caller
        self._cancel = cancel
        self._calls = calls
        exchange = call.exchange
        self._accepts: tuple[str, ...] = () if exchange is None else exchange.accepts
        self._call = call if self._accepts else None  # None: its caller accepts no questions
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None  # ends the wait for answers; None while it waits for none
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        with contextlib.suppress(RuntimeError):
            self._loop = weakref.ref(asyncio.get_running_loop())  # a program may end it long before the task

    def __repr__(self) -> str:
        return f"<TaskCall {self.task_id} {self.caller!r}>"

    @property
    def can_ask(self) -> bool:
        """Whether its caller accepts questions, and the call can be made again with the answers."""
        return self._call is not None and self._calls is not None

    def wait_for_input(self, expire: Callable[[], object]) -> None:
        """Calls a function where the call is neither stopped nor made again in time; to be called on its loop."""
        self._timer = asyncio.get_running_loop().call_later(INPUT_SECONDS, expire)

    def stop(self) -> None:
        """Cancels the call, if it runs."""
        cancel = self._cancel
        message = pb.ToolCancel(call_id=self.task_id, reason="the task was cancelled")

        def stop() -> None:
            self._stopped = True
            self._stop_timer()
            if cancel is not None:
                cancel(self.caller, [message], time.monotonic())

        self._soon(stop)

    def again(self, answers: Mapping[str, Any], state: str) -> None:
        """Makes the call again with the answers to its questions."""
        call, calls = self._call, self._calls
        if call is None or calls is None:
            return
        message = pb.ToolCall(
            call_id=self.task_id,
            name=call.entry.name,
            arguments_json=call.arguments_json,
            role=call.entry.table.role or "",
            timeout_seconds=call.timeout,
            context=call.context,
            accepts=self._accepts,
            input_responses_json=dump_json(answers),
            request_state=state,
        )

        def make() -> None:
            self._stop_timer()
            if not self._stopped:  # it may have been cancelled while its answers arrived
                calls(self.caller, [message], time.monotonic())

        self._soon(make)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _soon(self, act: Callable[[], object]) -> None:
        here = self._loop() if self._loop is not None else None
        if here is not None:
            with contextlib.suppress(RuntimeError):  # it is closed, and its calls have ended
                here.call_soon_threadsafe(act)


log = logging.getLogger("toolbus.tasks")

ELSEWHERE_SECONDS = 0.5  # between two looks at a task of another bus that somebody waits for
SOFT_SECONDS = 10.0  # how long a caller waits before its call becomes a task
DEFAULTS = TaskLimits()


class TaskManager:
    """The tasks of one bus, or of one program. Safe from any thread.

    Owners are checked where ``user_id`` is not None: another owner's task is treated like an unknown id.

    Args:
        timeout: how long `execute` waits before work becomes a task. It ends no work.
        path: an SQLite file for tasks that survive a restart; None: none does.
        task_seconds, finished_kept, finished_seconds, result_bytes, running, running_per_owner: as in `TaskLimits`.
        max_wait_seconds: how long `await_result` waits at most; no call takes longer.
        clock: seconds since the epoch, for what tasks say of themselves.
        monotonic: seconds, by which they expire.

    Raises:
        ValueError: from the constructor; the timeout or a limit is not a number, or below 0.
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
        max_wait_seconds: float = MAX_TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        check_limit("timeout", timeout)
        self.timeout = timeout
        self.home = ""  # the end of its ids, see `home_of`; "" where there is only one bus
        self.limits = TaskLimits(
            task_seconds=task_seconds,
            running=running,
            running_per_owner=running_per_owner,
            finished_kept=finished_kept,
            finished_seconds=finished_seconds,
            result_bytes=result_bytes,
        )
        self._max_wait_seconds = max_wait_seconds
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._index = TaskIndex(self.limits)
        self._work: dict[str, Work] = {}  # by task_id, as long as it runs
        self._watchers = TaskWatchers()
        self._followers = TaskWatchers()
        self._events: set[TaskEvents] = set()  # streams that are open
        self._delivery = Delivery()
        self._closed = False
        self._store: TaskStore | None = None  # None: no task survives a restart
        self._shares = False  # whether tasks that other buses began can be read
        if path is not None:
            self.persist_in(path)

    def __repr__(self) -> str:
        return f"<TaskManager {self._index!r}{' closed' if self._closed else ''}>"

    def persist_in(self, place: Store | Path) -> None:
        """Persists tasks from now on, and restores what there is; blocks for as long as that takes.

        A task that was running when it was last written has failed: its program has ended. After `close` it does
        nothing.

        Args:
            place: the store of the bus, or the path of a file for tasks alone.

        Raises:
            SetupError: the file cannot be used, or tasks are persisted elsewhere already.
            WriteFailed: the database that several buses share is away.
        """
        if self._store is not None:
            raise SetupError(f"tasks are persisted in {self._store.place} already, not in {place}: name one file")
        home = ""
        if isinstance(place, Store) and place.age is not None:  # several buses share it, and its clock
            home, self._clock = self.home, place.now
        store, now = TaskStore(place, self.limits.result_bytes, home), self._clock()
        self._shares = bool(home)
        try:
            stored = list(store.load())  # without the lock, for which the loop would wait as long as the database
        except BaseException:
            store.close()
            raise
        changed, dropped = [], []
        with self._lock:
            if not self._closed:
                here = self._index.all()
                for task in stored:
                    restored = task.with_error(ENDED_WITH_PROCESS, now) if task.running else task
                    ended, evicted = self._index.end(restored, self._monotonic())
                    if ended is not task:
                        changed.append(ended)
                    dropped += evicted
                for task in (*here, *changed):
                    store.put(task)
                store.remove(dropped)
                self._store = store
                self._expire()
                return
        store.close()  # `close` came first, and would not see it

    # -- the two ways in -----------------------------------------------------------------------------------------

    def adopt(
        self, call: Call, now: float, cancel: CancelCalls | None = None, calls: MakeCalls | None = None
    ) -> tuple[TaskCaller, str, Result] | None:
        """Takes over a running call.

        Args:
            now: by the clock of the dispatcher, as the call's times are.
            cancel, calls: the `cancels` and `calls` of the call's dispatcher, called on the loop that runs now, perhaps
                when the call has ended. None, or no loop: a cancelled task leaves its call running, and a task with
                questions fails.

        Returns:
            The call's new caller, its call_id there, and the answer for its former caller; None above the limits of
            running tasks.
        """
        started = self._clock() - (now - call.started)
        task = Task(new_id(self.home), call.entry.name, owner_of_call(call), started)
        by = call.caller
        caller = TaskCaller(by.principal, by.budget, self._called, by.quota, may_set_context=by.may_set_context)
        task_call = TaskCall(call, task.task_id, caller, cancel, calls)
        if not self._begin(task, Work(task_call.stop, task_call), call.root.caller.principal.account):
            return None
        return caller, task.task_id, Result(call.call_id, dump_json(envelope(task)))

    async def execute(
        self, awaitable: Awaitable[Any], tool_name: str, user_id: str = "", channel_id: str = "", platform: str = ""
    ) -> str:
        """Runs some work; when it takes longer than ``timeout`` it goes on as a task.

        Cancelling this cancels the work, unless it has become a task. Above the limits of running tasks, this waits
        for the work until ``task_seconds``.

        Returns:
            The work's result, a text as it is and any other value as compact JSON; or the task's envelope, as JSON.

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
            task = Task(new_id(self.home), tool_name, user_id, started, channel_id=channel_id, platform=platform)
            if self._detach(task, work, end):
                return dump_json(envelope(task))
            if not await _ends_within(work, end - loop.time()):
                _cancel(work)
                raise TimeoutError(self._too_long())
        value = work.result()
        return value if isinstance(value, str) else text_of(result_of(value))

    def _detach(self, task: Task, work: asyncio.Future[Any], end: float) -> bool:
        """Makes running work a task; returns False above the limits of running tasks."""
        loop = work.get_loop()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # its loop is closed, and the work with it
                loop.call_soon_threadsafe(_cancel, work)

        if not self._begin(task, Work(stop)):
            return False
        timer = loop.call_at(end, self._end, task.task_id, None, self._too_long())
        work.add_done_callback(functools.partial(self._worked, task.task_id, timer))
        return True

    def _worked(self, task_id: str, timer: asyncio.TimerHandle, work: asyncio.Future[Any]) -> None:
        timer.cancel()
        if work.cancelled():
            self._end(task_id, error="its work was cancelled, or the event loop that ran it has ended")
        elif (error := work.exception()) is not None:
            self._end(task_id, error=error_text(error))
        else:
            try:
                self._end(task_id, result_of(work.result()))
            except TypeError as type_error:  # JSON cannot hold it
                self._end(task_id, error=error_text(type_error))

    def _too_long(self) -> str:
        return f"it did not end within {self.limits.task_seconds:g} s (limit task_seconds) and was cancelled"

    # -- fetching ------------------------------------------------------------------------------------------------

    def get_result(self, task_id: str, user_id: str | None = None) -> Task | None:
        """Returns a task as it is now; None where the id is unknown, or the task is another user's."""
        with self._lock:
            self._expire()
            task = self._index.find(task_id, user_id)
            return None if task is None else self._now(task)

    async def find(self, task_id: str, user_id: str | None = None) -> Task | None:
        """Returns a task as it is now: `get_result`; or as another bus wrote it, where buses share their results.

        Raises:
            HomeAway: it was begun at another bus, which is not there, or before the database went: its state is not
                known.
        """
        if not is_of_another(task_id, self.home):
            task = self.get_result(task_id, user_id)
            if task is None and self._shares and self._store is None:
                raise HomeAway(
                    f"{task_id} is not known before the database that the buses share is back: try again later, and do "
                    "not call the tool again for this"
                )
            return task
        task, name, there = None, "", None
        if self._shares and self._store is not None:
            task = await asyncio.to_thread(self._store.find_elsewhere, task_id)
            if task is not None and (not task.running or user_id not in (None, task.owner)):
                return task if user_id in (None, task.owner) else None
            name, there = await asyncio.to_thread(self._store.home_of_task, task_id)
        if there is not False and (task is not None or there):
            return task
        raise HomeAway(
            f"{task_id} was begun at another bus, its home {name or f'…{task_id[-HOME_DIGITS:]}'}, which is away or is "
            "not asked here: it may go on there, or have ended with that bus. Try again later, and do not call the "
            "tool again for this"
        )

    async def _await_elsewhere(self, task_id: str, timeout: float, user_id: str | None) -> Task | None:
        end = self._monotonic() + min(timeout, self._max_wait_seconds)
        while (task := await self.find(task_id, user_id)) is not None and task.running and self._monotonic() < end:
            await asyncio.sleep(min(ELSEWHERE_SECONDS, max(0.0, end - self._monotonic())))
        return task

    async def await_result(
        self, task_id: str, timeout: float = MAX_TIMEOUT_SECONDS, user_id: str | None = None
    ) -> Task | None:
        """Waits until a task has ended, for ``timeout`` seconds. A task that still runs then goes on.

        Args:
            timeout: above the manager's ``max_wait_seconds``, 300 by default, that many are meant.

        Returns:
            The task as it is then; None where the id is unknown, or the task is another user's.

        Raises:
            HomeAway: as `find`.
        """
        if is_of_another(task_id, self.home):
            return await self._await_elsewhere(task_id, timeout, user_id)
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
            await asyncio.wait([waiter], timeout=min(timeout, self._max_wait_seconds) if timeout > 0 else 0)
        finally:
            with self._lock:
                waiters.discard(waiter)
        return waiter.result() if waiter.done() else self.get_result(task_id, user_id)

    def now(self) -> float:
        """Returns the time, by the clock that the tasks' times are of."""
        return self._clock()

    def list_tasks(self, user_id: str | None) -> list[Task]:
        """Returns a user's tasks, or (None) all: those that run, then the finished ones, each newest first."""
        with self._lock:
            self._expire()
            return [self._now(task) for task in self._index.of(user_id)]

    def cancel(self, task_id: str, user_id: str | None = None) -> bool:
        """Cancels a task: it ends at once, its work as soon as it can. Returns whether it was running."""
        with self._lock:
            task = self._index.find(task_id, user_id)
        return task is not None and task.running and self._end(task_id, error=CANCELLED, status=Status.CANCELLED)

    def answer(self, task_id: str, answers: Mapping[str, Any], user_id: str | None = None) -> Task | None:
        """Answers questions of a task. It goes on under the same id once all are answered.

        Args:
            answers: by the keys of the questions; others are ignored, as are those of a task that asks nothing.

        Returns:
            The task as it is then; None where the id is unknown, or the task is another user's.

        Raises:
            InvalidInput: an answer does not fit its question; none of them counts.
        """
        with self._lock:
            task, work = self._index.find(task_id, user_id), self._work.get(task_id)
            if task is None or work is None or task.status is not Status.INPUT_REQUIRED:
                return task
            given = check_answers(task.questions, answers)
            if not given:
                return task
            work.answers |= given
            left = {key: question for key, question in task.questions.items() if key not in given}
            task = self._change(task.with_questions(left, self._clock()))
        self._followers.notify(task)
        if not left:
            work.go_on()
        return task

    async def flush(self) -> None:
        """Waits until all tasks are written as they are now, where they are persisted."""
        if self._store is not None:
            await asyncio.to_thread(self._store.flush)

    # -- notifications -------------------------------------------------------------------------------------------

    def subscribe(self, callback: OnFinished, user_id: str | None = None) -> Callable[[], None]:
        """Calls a function for each task that ends from now on; returns the function that unsubscribes it.

        It is called with the task, on the thread on which that ended, perhaps on the bus's loop: it must not block.
        """
        return self._watchers.add(callback, user_id)

    def follow(self, callback: OnFinished, user_id: str | None = None) -> Callable[[], None]:
        """Calls a function for each change of a task's state, as `subscribe` does for its end."""
        return self._followers.add(callback, user_id)

    def events(self, user_id: str | None = None, *, results: bool = True) -> TaskEvents:
        """Returns a stream of the tasks that end from now on, for the running loop: ``async for task in events``.

        Args:
            results: whether they come with their results, which then stay in memory until a slow reader takes them.
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
        """Delivers a task's result when it ends, or at once where it has ended. The last target counts.

        A redirect ends with the process.

        Args:
            target: a function, called with the task as that of `subscribe` is; a URL of this machine, which gets a POST
                with `task_id`, `tool`, `status`, `text` and `truncated`; None for none.

        Returns:
            False where the id is unknown, or the task is another user's.

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
        """Ends all work and writes the rest; blocks for as long as that takes. Finished tasks can still be fetched."""
        with self._lock:
            self._closed = True
            running, streams = list(self._work), list(self._events)
        for task_id in running:
            self._end(task_id, error=ENDED_WITH_PROCESS)
        for events in streams:
            events.close()
        self._delivery.close()
        if self._store is not None:
            self._store.close()

    def _begin(self, task: Task, work: Work, account: str = "") -> bool:
        with self._lock:
            if self._closed or not self._index.begin(task, account):
                return False
            self._work[task.task_id] = work
            self._persist(task)
        return True

    def _called(self, task_id: str, result: Result) -> None:
        """Takes the result of a task's call, which may end with questions."""
        if not result.input_requests_json:
            self._end(task_id, result)
            return
        try:
            questions = read_requests(result.input_requests_json)
            if not self._ask(task_id, questions, result.request_state):
                raise InvalidInput("its caller answers no questions")
        except InvalidInput as error:
            self._end(task_id, error=f"it asked for input, which failed: {error}")

    def _ask(self, task_id: str, questions: Mapping[str, Any], state: str) -> bool:
        """Makes a task wait for answers; returns False where its call cannot be made again with them."""
        with self._lock:
            task, work = self._index.find(task_id), self._work.get(task_id)
            if task is None or work is None:
                return True  # it has ended
            if work.call is None or not work.call.can_ask:
                return False
            work.state = state
            work.call.wait_for_input(lambda: self._end(task_id, error=NO_ANSWERS))
            task = self._change(task.with_questions(questions, self._clock()))
        self._followers.notify(task)
        return True

    def _change(self, task: Task) -> Task:
        self._index.update(task)
        self._persist(task)
        return task

    def _end(self, task_id: str, result: Result | None = None, error: str = "", status: Status = Status.FAILED) -> bool:
        """Ends a task, by its result or with an error; returns False, and changes nothing, where it has ended."""
        now = self._clock()
        with self._lock:
            work = self._work.pop(task_id, None)
            task = self._index.find(task_id)
            if work is None or task is None:
                return False
            if result is None:
                ended = task.with_error(error, now, status)
            else:
                ended = task.with_result(dataclasses.replace(result, call_id=task_id), now)
            ended, evicted = self._index.end(ended, self._monotonic())
            self._persist(ended, evicted)
            waiters = list(work.waiters)
        for waiter in waiters:
            _wake(waiter, ended)
        if result is None:
            try:
                work.stop()
            except Exception:
                log.exception("cancelling the work of %r failed", ended)
        self._watchers.notify(ended)
        self._followers.notify(ended)
        if work.target is not None:
            self._delivery.send(ended, work.target)
        return True

    def _now(self, task: Task) -> Task:
        """Returns a task with its last progress."""
        call = self._work[task.task_id].call if task.running else None
        return task if call is None else dataclasses.replace(task, progress=call.caller.latest)

    def _expire(self) -> None:
        expired = self._index.expire(self._monotonic())
        if expired and self._store is not None:
            self._store.remove(expired)

    def _persist(self, task: Task, evicted: list[str] | None = None) -> None:
        if self._store is not None:
            self._store.put(task)
            self._store.remove(evicted or ())  # its own id may be among them


async def _ends_within(work: asyncio.Future[Any], seconds: float) -> bool:
    """Waits for some work; cancelling the wait cancels it. Returns whether it ended in time."""
    try:
        done, _ = await asyncio.wait([work], timeout=max(0.0, seconds))
    except asyncio.CancelledError:
        _cancel(work)
        raise
    return bool(done)


def _cancel(work: asyncio.Future[Any]) -> None:
    """Cancels some work whose result is not needed any more."""
    work.cancel()
    work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # else asyncio logs an unread error


def _wake(waiter: asyncio.Future[Task], task: Task) -> None:
    def wake() -> None:
        if not waiter.done():
            waiter.set_result(task)

    with contextlib.suppress(RuntimeError):  # its loop is closed, and its waiter with it
        waiter.get_loop().call_soon_threadsafe(wake)
