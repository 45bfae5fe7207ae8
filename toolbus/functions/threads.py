"""Runs work on other threads: batches for a loop, a loop on a thread of its own, worker threads for blocking handlers.

Nothing here knows the bus. The connection has a `LoopThread`, so that no handler can delay its heartbeats; `Inbox`
passes calls and results to a loop with one wake-up for each batch; `Workers` runs plain functions.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

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
        self._jobs.append(job)  # before the look at the loop: `run_left` looks the other way round
        try:
            if not self._loop.is_closed():
                if not self._woken:
                    self._woken = True
                    self._loop.call_soon_threadsafe(self._run)
                return True
        except RuntimeError:  # it was closed just now
            pass
        with suppress(ValueError, IndexError):  # `run_left` was faster
            self._jobs.remove(job)
        return False

    def run_left(self) -> None:
        """Runs what came too late for a loop that is now closed; for work that checks by itself that all is over."""
        if self._loop.is_closed():
            self._run()

    def _run(self) -> None:
        self._woken = False  # before the count: what is put from now on wakes the loop again
        jobs = self._jobs
        for _ in range(len(jobs)):
            function, argument = jobs.popleft()
            try:
                function(argument)
            except Exception:  # one job must not hold up the others
                log.exception("a fault of the SDK in %r", function)


class ChangeSignal:
    """Wakes the coroutines of one loop that wait for some state to change; each then looks for itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        """Wakes all who wait."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def next(self, timeout: float | None = None) -> None:
        """Waits for the next change, at most ``timeout`` seconds."""
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        await asyncio.wait([waiter], timeout=timeout)
        self._waiters.discard(waiter)

    async def until(self, met: Callable[[], bool], seconds: float) -> bool:
        """Waits until a condition is met, at most so long; returns whether it is."""
        end = self._loop.time() + seconds
        while not met():
            if (left := end - self._loop.time()) <= 0:
                return False
            await self.next(left)
        return True


class LoopThread:
    """An asyncio loop on a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def ask(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the loop; the future may be waited for on any other thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()
            raise

    def stop(self, wait: float = 5.0) -> None:
        """Ends the loop and waits for the thread; on the thread itself it only ends the loop."""
        try:
            self.loop.call_soon_threadsafe(self.loop.stop)
        except RuntimeError:
            return
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(wait)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()


class Workers:
    """Daemon threads that run plain functions, oldest first.

    Unlike those of ``concurrent.futures`` they do not keep the process alive: a handler that never returns must not
    stop a plugin from ending after its grace period.
    """

    def __init__(self, most: int, name: str) -> None:
        if most < 1:
            raise ValueError(f"workers is {most}, it must be at least 1: sync handlers need a thread to run on")
        self._most = most
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0  # started so far
        self._unfinished = 0  # jobs that are running or waiting

    def put(self, function: Callable[[Any], object], argument: Any = None) -> None:
        """Has a thread call ``function(argument)``, which must not raise."""
        with self._lock:
            self._unfinished += 1
            start = self._threads < min(self._most, self._unfinished)
            if start:
                self._threads += 1
                number = self._threads
        self._jobs.put((function, argument))
        if start:
            threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True).start()

    async def run(self, function: Callable[[], T]) -> T:
        """Runs a function on a thread, with the context variables of here; cancelling leaves it running."""
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

    def stop(self) -> None:
        """Ends the threads that are idle; the others end after their job."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, argument = job
            try:
                function(argument)
            except Exception:
                log.exception("a fault of the SDK in %r", function)
            del job, function, argument  # an idle thread must not keep the last call alive
            with self._lock:
                self._unfinished -= 1
