"""What one load generator saw in its window of time, written as one line of JSON for the process that started it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of one contestant at one number of calls in flight, from one run."""

    in_flight: int
    calls_per_second: float
    p50_us: float
    p99_us: float
    middle_cpu_us: float  # CPU time of the middle process for each call

    def print(self) -> None:
        """Hands the figures to the process that reads our standard output."""
        sys.stdout.write(json.dumps(asdict(self)) + "\n")
        sys.stdout.flush()


class Clock:
    """Measures one window: warm-up, then the calls that end before its end.

    Args:
        middle_pid: the process whose CPU time is charged to the calls.
    """

    def __init__(self, in_flight: int, warm_up: float, seconds: float, middle_pid: int) -> None:
        self._in_flight = in_flight
        self._middle = psutil.Process(middle_pid)
        self.latencies: list[int] = []  # nanoseconds, of the window only
        self._cpu = 0.0  # CPU seconds of the middle when the window began
        self.begins_at = time.perf_counter_ns() + int(warm_up * 1e9)
        self.ends_at = self.begins_at + int(seconds * 1e9)
        self._began_at = 0  # 0 during the warm-up

    def _cpu_seconds(self) -> float:
        times = self._middle.cpu_times()
        return float(times.user + times.system)

    def begin(self, now: int) -> None:
        """Ends the warm-up."""
        self.latencies.clear()
        self._cpu = self._cpu_seconds()
        self._began_at = now
        self.begins_at = self.ends_at * 2  # never again

    def close(self, now: int) -> Window:
        """Returns the figures; ``now`` is when the last call of the window ended."""
        spent = self._cpu_seconds() - self._cpu
        if not self.latencies or not self._began_at:
            raise RuntimeError("no call ended in the window: make it longer (--seconds)")
        ordered = sorted(self.latencies)
        count = len(ordered)
        return Window(
            in_flight=self._in_flight,
            calls_per_second=count / ((now - self._began_at) / 1e9),
            p50_us=ordered[count // 2] / 1e3,
            p99_us=ordered[min(count - 1, count * 99 // 100)] / 1e3,
            middle_cpu_us=spent / count * 1e6,
        )


async def keep_asking(ask: Callable[[int], Awaitable[None]], clock: Clock, in_flight: int) -> Window:
    """Runs one window: as many tasks as calls in flight, each asking again as soon as it is answered.

    Args:
        ask: makes one call, given the number of its task, and returns when it is answered.
    """
    figures: list[Window] = []  # the first call that ends after the window closes it

    async def go_on(slot: int) -> None:
        while not figures:
            asked_at = time.perf_counter_ns()
            await ask(slot)
            now = time.perf_counter_ns()
            if now >= clock.begins_at:
                clock.begin(now)
            clock.latencies.append(now - asked_at)
            if now >= clock.ends_at and not figures:
                figures.append(clock.close(now))

    await asyncio.gather(*(go_on(slot) for slot in range(in_flight)))
    return figures[0]
