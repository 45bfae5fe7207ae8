"""Runs `toolbus serve` and notes how long its loop was held: ``python -m lab.hostile.watched_bus FILE OPTIONS…``.

Each line of the file is a moment of the monotonic clock and how many seconds the loop had run since its last turn:
processor time, so that a machine that is busy with others holds no loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

import uvloop

from toolbus.cli import main

FIRST = -20  # priority: other work of the machine is not what is measured
BEAT_SECONDS = 0.004
NOTED_SECONDS = 0.01


def watch(loop: asyncio.AbstractEventLoop, path: str) -> None:
    """Beats on a loop, and notes the beats that are late."""
    file = open(path, "a", buffering=1)  # noqa: SIM115  # as long as the process

    def beat(wall: float, ran: float) -> None:
        now, runs = time.monotonic(), time.thread_time()
        held = min(now - wall - BEAT_SECONDS, runs - ran)
        if held > NOTED_SECONDS:
            file.write(f"{now} {held}\n")
        loop.call_later(BEAT_SECONDS, beat, now, runs)

    loop.call_soon(lambda: beat(time.monotonic(), time.thread_time()))


def take_priority(priority: int) -> None:
    """Gives this process, and the group that Linux schedules it in, a priority, where its user may.

    Where the lab has a real-time priority, as beside other work, its own peers get a higher one than the hostile ones.
    """
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_RR:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, priority)
        Path("/proc/self/autogroup").write_text(str(priority), "ascii")


if __name__ == "__main__":
    take_priority(FIRST)
    path, make = sys.argv.pop(1), uvloop.new_event_loop

    def watched() -> uvloop.Loop:
        loop = make()
        watch(loop, path)
        return loop

    uvloop.new_event_loop = watched
    main()
