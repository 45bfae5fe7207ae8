"""Runs work on other threads: batches for a loop, a loop on a thread of its own.

Nothing here knows the bus. Finished tasks are posted on a `LoopThread`, whatever the program's own loop does; `Inbox`
passes calls and results to a loop with one wake-up for each batch.
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


def ask_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Runs a coroutine on the loop of another thread; the future may be waited for on any but that one.

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

    def ask(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the loop; the future may be waited for on any other thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        return ask_loop(self.loop, coroutine)

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
