"""Waits for events with a generous bound, and measures time so that a busy machine does not fail a test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

WAIT_SECONDS = 60.0  # until a test gives up; what it waits for takes milliseconds on a quiet machine
HANG_SECONDS = 150.0  # for a program that is the whole of a test: only a hang takes as long; pytest waits for 180 s
LOOK_SECONDS = 0.005  # between two looks at a condition that has no event

T = TypeVar("T")


async def within(work: Awaitable[T], seconds: float = WAIT_SECONDS) -> T:
    """Returns what an awaitable returns; fails the test after ``seconds``."""
    return await asyncio.wait_for(work, seconds)


async def until(condition: Callable[[], object], what: str = "it", seconds: float = WAIT_SECONDS) -> None:
    """Waits until a condition holds; fails the test, naming what was awaited, after the looks of ``seconds``.

    On a busy machine each look takes longer, and so does the bound.
    """
    for _ in range(round(seconds / LOOK_SECONDS)):
        if condition():
            return
        await asyncio.sleep(LOOK_SECONDS)
    assert condition(), f"waited {seconds:g} s for {what}"


def until_sync(condition: Callable[[], object], what: str = "it", seconds: float = WAIT_SECONDS) -> None:
    """Waits as `until` does, without an event loop: for other threads and processes."""
    for _ in range(round(seconds / LOOK_SECONDS)):
        if condition():
            return
        time.sleep(LOOK_SECONDS)
    assert condition(), f"waited {seconds:g} s for {what}"


class Stopwatch:
    """Counts short pauses of a thread, in seconds: on a busy machine each pause takes longer, and so do bounds.

    On a quiet machine `seconds` is the time since the stopwatch was made.
    """

    def __init__(self) -> None:
        self._pauses = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, name="stopwatch", daemon=True)
        self._thread.start()

    def _count(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._pauses += 1

    def seconds(self) -> float:
        """Ends the stopwatch and returns what it counted."""
        self._ended.set()
        self._thread.join()
        return self._pauses * LOOK_SECONDS
