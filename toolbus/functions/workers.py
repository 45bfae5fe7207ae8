"""Runs plain functions on worker threads: those that are put together on one, as long as none of them blocks."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

# Nothing here knows the bus.

T = TypeVar("T")
Job = tuple[Callable[[Any], object], Any]

log = logging.getLogger(__name__)


class Inbox:
    """Runs functions on a loop, in the order in which any thread put them.

    Waking a loop costs a system call and often a switch of threads, so only the first of a batch does it.
    """

    __slots__ = ("_jobs", "_loop", "_woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: deque[Job] = deque()
        self._woken = False  # whether the loop was woken and has not run yet

    def put(self, function: Callable[[Any], object], argument: Any = None) -> bool:
        """Has the loop call ``function(argument)`` soon; returns False where the loop is closed."""
        job = (function, argument)
        self._jobs.append(job)  # before it looks at the loop: `run_remaining` looks at the loop, then at the jobs
        try:
            if not self._loop.is_closed():
                if not self._woken:
                    self._woken = True
                    self._loop.call_soon_threadsafe(self._run)
                return True
        except RuntimeError:  # it was closed just now
            pass
        with suppress(ValueError, IndexError):  # `run_remaining` has taken it
            self._jobs.remove(job)
        return False

    def run_remaining(self) -> None:
        """Runs the jobs that a closed loop did not run; each has to check by itself that the loop is closed."""
        if self._loop.is_closed():
            self._run()

    def _run(self) -> None:
        self._woken = False  # before the count: a job that is put from now on wakes the loop again
        jobs = self._jobs
        for _ in range(len(jobs)):
            function, argument = jobs.popleft()
            try:
                function(argument)
            except Exception:  # one job must not hold up the others
                log.exception("a fault of the SDK in %r", function)


class ChangeSignal:
    """Wakes the coroutines of one loop that wait for a change of state; each then looks at the state itself."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_awaited(self) -> bool:
        """Whether any waits."""
        return bool(self._waiters)

    def notify(self) -> None:
        """Wakes all coroutines that wait."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def next(self, timeout: float | None = None) -> None:
        """Waits for the next change, at most ``timeout`` seconds."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout)
        finally:
            self._waiters.discard(waiter)

    async def until(self, met: Callable[[], bool], seconds: float) -> bool:
        """Waits until a condition is met, at most for some seconds; returns whether it is."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while not met():
            if (left := end - clock()) <= 0:
                return False
            await self.next(left)
        return True


def submit_to(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Runs a coroutine on the loop of another thread; any thread but that one may wait for the future.

    Raises:
        RuntimeError: the loop is closed.
    """
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise


BLOCKED_SECONDS = 0.001  # that a job waits behind another one, after which that one counts as blocked
_QUICK_JOBS = 16  # that threads begin in this time where none is blocked
_QUIET_LOOKS = 8  # of the watch, before it waits for an alarm: waking it for each message would cost more
_FULL_PAUSE = 0.05  # seconds between two looks while every thread is busy


class Workers:
    """Daemon threads that run plain functions, oldest first.

    Waking a thread costs more than a short function, so one thread runs the jobs that are put together. Others are
    woken only where a function blocks that thread: a watch looks every `BLOCKED_SECONDS` while jobs wait.

    Unlike those of ``concurrent.futures`` they do not prevent the end of the process: a plugin ends after its grace
    period, also where a handler never returns.

    Attributes:
        at_rest: called on a thread that has no more jobs, and by the watch: sends what has collected until then.
    """

    def __init__(self, most: int, name: str) -> None:
        if most < 1:
            raise ValueError(f"workers is {most}, it must be at least 1: sync handlers need a thread to run on")
        self.at_rest: Callable[[], object] = lambda: None
        self._most = most
        self._name = name
        self._jobs: deque[Job] = deque()  # that no thread has taken yet
        self._idle: deque[threading.Lock] = deque()  # of threads that wait, each for its own
        self._lock = threading.Lock()  # guards the numbers of threads
        self._threads = 0  # that run or wait
        self._started = 0  # threads so far
        self._put = 0  # jobs so far
        self._moved = 0.0  # when a thread last took a job or was woken for one
        self._watching = False  # whether the watch looks
        self._jobs_arrived = False  # whether a job was put since the watch last looked
        self._is_full = False  # whether jobs wait and no thread is left to wake
        self._alarm: queue.SimpleQueue[bool] = queue.SimpleQueue()  # wakes the watch; False ends it
        self._has_watch = False
        self._stopped = False

    def __repr__(self) -> str:
        return f"<Workers {self._name} threads={self._threads} idle={len(self._idle)} jobs={len(self._jobs)}>"

    def put(self, function: Callable[[Any], object], argument: Any = None) -> None:
        """Has a thread call ``function(argument)``, which must not raise."""
        self._put += 1
        self._jobs.append((function, argument))
        if not self._wake_first():
            self._watch_jobs()

    def put_all(self, function: Callable[[Any], object], arguments: Sequence[Any]) -> None:
        """Has threads call ``function`` with each of the arguments."""
        self._put += len(arguments)
        self._jobs.extend([(function, argument) for argument in arguments])
        if not self._wake_first() or len(arguments) > 1:
            self._watch_jobs()

    async def run(self, function: Callable[[], T]) -> T:
        """Runs a function on a thread, with the caller's context variables; cancelling does not stop it."""
        future: Future[T] = Future()
        context = contextvars.copy_context()

        def work(_: None) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(context.run(function))
                except BaseException as problem:
                    future.set_exception(problem)

        self.put(work)
        return await asyncio.wrap_future(future)

    def renewed(self) -> Workers:
        """Returns new threads in the place of these, which were stopped."""
        return Workers(self._most, self._name)

    def stop(self) -> None:
        """Ends the threads that are idle; the others end after the last job."""
        self._stopped = True
        while self._wake_idle():
            pass
        self._alarm.put(False)

    def _wake_first(self) -> bool:
        """Wakes a thread for a job, unless one that took a job just now will take it too; returns whether it did."""
        now = time.monotonic()
        if now - self._moved < BLOCKED_SECONDS and self._threads > len(self._idle):
            return False
        self._moved = now
        return self._wake_idle() or self._start_thread()

    def _wake_idle(self) -> bool:
        try:
            self._idle.pop().release()  # the one that ran last
        except IndexError:
            return False
        return True

    def _start_thread(self) -> bool:
        with self._lock:
            if self._threads >= self._most:
                return False
            self._threads += 1
            self._started += 1
            number = self._started
        threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True).start()
        return True

    def _run(self) -> None:
        woken = threading.Lock()
        woken.acquire()
        jobs = self._jobs
        while True:
            try:
                function, argument = jobs.popleft()
            except IndexError:
                if not self._rest(woken):
                    return
                continue
            self._moved = time.monotonic()
            try:
                function(argument)
            except Exception:
                log.exception("a fault of the SDK in %r", function)
            del function, argument  # an idle thread must not keep the last call alive
            if jobs:  # the next may block, and with it other jobs and the results of those before
                if self._is_full:
                    self.at_rest()
                elif not self._watching:
                    self._watch_jobs()

    def _rest(self, woken: threading.Lock) -> bool:
        """Waits for the next job on a thread that has none; returns False where the thread ends instead."""
        self.at_rest()
        self._idle.append(woken)  # before it looks for jobs: `put` first adds a job, then looks for idle threads
        if self._jobs or self._stopped:
            try:
                self._idle.remove(woken)
            except ValueError:
                pass  # it was woken just now
            else:
                if self._jobs:
                    return True
                with self._lock:
                    self._threads -= 1
                return False
        woken.acquire()
        return True

    def _watch_jobs(self) -> None:
        self._jobs_arrived = True
        if self._watching and not self._is_full:
            return
        with self._lock:
            start, self._has_watch = not self._has_watch, True
            self._watching = True
        self._alarm.put(True)
        if start:
            threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True).start()

    def _watch(self) -> None:
        """Wakes a thread for each job that waits, where functions block the threads that run."""
        while self._alarm.get():
            quiet = 0  # looks in a row without a reason
            put, waiting = self._put, len(self._jobs)
            while quiet < _QUIET_LOOKS and not self._stopped:
                time.sleep(BLOCKED_SECONDS)
                self.at_rest()
                put_before, put, waiting_before, waiting = put, self._put, waiting, len(self._jobs)
                added = put - put_before
                if waiting > added and waiting_before + added - waiting < _QUICK_JOBS:
                    self._spread(waiting)
                quiet = 0 if waiting or self._jobs_arrived else quiet + 1
                if not quiet:
                    self._jobs_arrived = False  # only here: a job may be put at any moment
            self._watching = False
            if self._stopped:
                break
            if self._jobs or self._jobs_arrived:  # the results of jobs that a thread took may wait for the watch
                self._watch_jobs()
        with self._lock:
            self._has_watch = self._watching = False

    def _spread(self, jobs: int) -> None:
        """Wakes threads for jobs that wait; where all are busy, waits until a job is put or some time has passed."""
        while jobs and (self._wake_idle() or self._start_thread()):
            jobs -= 1
        if jobs:
            self._is_full = True
            self.at_rest()
            with suppress(queue.Empty):
                self._alarm.get(timeout=_FULL_PAUSE)
            self._is_full = False
