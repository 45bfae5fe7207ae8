"""Passes work to event loops: `Inbox` with one wake-up for a batch, `LoopThread` with a loop on a thread of its own.

Nothing here knows the bus.
"""

from __future__ import annotations

import asyncio
import logging
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

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wakes all coroutines that wait."""
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
        """Waits until a condition is met, at most for some seconds; returns whether it is."""
        end = self._loop.time() + seconds
        while not met():
            if (left := end - self._loop.time()) <= 0:
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


class LoopThread:
    """An asyncio loop on a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the loop; any other thread may wait for the future.

        Raises:
            RuntimeError: the loop is closed.
        """
        return submit_to(self.loop, coroutine)

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
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
