"""Runs coroutines on an event loop of its own, on a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from toolbus.functions.workers import submit_to

T = TypeVar("T")


class LoopThread:
    """An asyncio loop on a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
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
