"""Notices that this process stood still: it was stopped, its machine was suspended, or its loop was held up.

The first messages that such a process reads may be old: its senders went on meanwhile, and calls that they gave up are
still in the socket. A late tick shows a stall. A reader of messages also compares the clock with `StallWatch.due`
before each message, since it may read the first one before the late tick.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

_BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", None)  # of Linux; the monotonic clock stands still while it is suspended


def boot_time() -> float:
    """Returns the seconds since some moment, including those of a suspended machine where the system counts them."""
    return time.monotonic() if _BOOT_TIME is None else time.clock_gettime(_BOOT_TIME)


class StallWatch:
    """Tells when this process stood still, and since when.

    Args:
        tick_seconds: between two ticks; idle processes wake for each.
        late_seconds: how late a tick may come without meaning a stall.
        clock: see `boot_time`.
        awake_clock: the same without the time in which the machine was suspended.

    Attributes:
        lag: how late the newest tick came, in seconds.
        due: a moment of ``clock``; a reader that finds it passed calls `notice`. Infinity before the first tick.
        since: the last moment at which the process is known to have run before the newest stall.
        suspended: whether the machine was suspended in the newest stall: messages of other machines from before may
            come late, so that only an answer tells which ones are new.
        unsettled: whether messages on new connections may be older than the end of the stall.
    """

    def __init__(
        self,
        tick_seconds: float,
        late_seconds: float,
        clock: Callable[[], float] = boot_time,
        awake_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._awake_clock = awake_clock
        self._tick_seconds = tick_seconds
        self._late_seconds = late_seconds
        self.lag = 0.0
        self.due = math.inf
        self.since = 0.0
        self.suspended = False
        self.unsettled = False
        self._in_time = 0  # ticks since the newest stall
        self._awake_at = 0.0  # when the process was last known to run
        self._asleep = 0.0  # how far the two clocks are apart
        self._on_stall: list[Callable[[], None]] = []
        self._on_settled: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None  # None until started

    def __repr__(self) -> str:
        return f"<StallWatch due={self.due:.1f}{' unsettled' if self.unsettled else ''}>"

    def listen(self, on_stall: Callable[[], None], on_settled: Callable[[], None]) -> None:
        """Adds functions to call when a stall is noticed, and when all messages that arrived in it have been read."""
        self._on_stall.append(on_stall)
        self._on_settled.append(on_settled)

    def start(self) -> None:
        """Ticks on the running loop until stopped."""
        self.tick()
        self._timer = asyncio.get_running_loop().call_later(self._tick_seconds, self.start)

    def stop(self) -> None:
        """Stops ticking."""
        if self._timer is not None:
            self._timer.cancel()
        self.due = math.inf

    def tick(self) -> None:
        """Notes that the process runs; a late tick notices a stall."""
        now = self.clock()
        if now > self.due:
            self.notice()
            return
        self._ran(now)
        self._in_time += 1
        if self.unsettled and self._in_time == 2:  # the first one may have been due when the stall began
            self.unsettled = False
            for settled in self._on_settled:
                settled()

    def notice(self) -> None:
        """Notes a stall, whose end was just seen."""
        now, asleep = self.clock(), self.clock() - self._awake_clock()
        if not self.unsettled:
            self.since, self.suspended = self._awake_at, False
        self.suspended |= asleep - self._asleep > self._late_seconds
        self._ran(now)
        self._in_time = 0
        self.unsettled = True
        for stalled in self._on_stall:
            stalled()

    def _ran(self, now: float) -> None:
        if self.due < math.inf:
            self.lag = max(0.0, now - (self.due - self._late_seconds))
        self._awake_at, self._asleep = now, now - self._awake_clock()
        self.due = now + self._tick_seconds + self._late_seconds
