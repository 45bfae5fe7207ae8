"""What one load generator saw in its window of time, written as one line of JSON for the process that started it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

import psutil

from lab.benchmarks import workload
from lab.benchmarks.cells import Cell


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of one contestant in one cell, from one run."""

    in_flight: int
    calls_per_second: float
    p50_us: float
    p99_us: float
    middle_cpu_us: float  # CPU time of the middle process for each call
    size: int = 0  # bytes of arguments, as in `Cell`

    @property
    def cell(self) -> Cell:
        """Which cell it is."""
        return Cell(self.in_flight, self.size)

    def print(self) -> None:
        """Hands the figures to the process that reads our standard output."""
        sys.stdout.write(json.dumps(asdict(self)) + "\n")
        sys.stdout.flush()


LEAST_CALLS = 8  # of a window; it goes on until it has them

Ask = Callable[[int], Awaitable[None]]
"""Makes one call, given the number of its task, and returns when it is answered."""
Prepare = Callable[[Sequence[str]], Ask]
"""Makes ready to ask with these arguments, one text for each task."""


class Clock:
    """Measures one window: warm-up, then the calls that end before its end.

    Args:
        middle_pid: the process whose CPU time is charged to the calls; 0 is this one.
    """

    def __init__(self, cell: Cell, warm_up: float, seconds: float, middle_pid: int) -> None:
        self._cell = cell
        self._seconds = seconds
        self._middle = psutil.Process(middle_pid or None)
        self.latencies: list[int] = []  # nanoseconds, of the window only
        self._cpu = 0.0  # CPU seconds of the middle when the window began
        self.begins_at = time.perf_counter_ns() + int(warm_up * 1e9)
        self.ends_at = self.begins_at + int(seconds * 1e9)
        self._began_at = 0  # 0 during the warm-up

    def _cpu_seconds(self) -> float:
        times = self._middle.cpu_times()
        return float(times.user + times.system)

    def begin(self, now: int) -> None:
        """Ends the warm-up: what has ended until now does not count. Who answers late gets the whole window, too."""
        self.latencies.clear()
        self._cpu = self._cpu_seconds()
        self._began_at = now
        self.ends_at = now + int(self._seconds * 1e9)
        self.begins_at = self.ends_at * 2  # never again

    def close(self, now: int) -> Window:
        """Returns the figures; ``now`` is when the last call of the window ended."""
        spent = self._cpu_seconds() - self._cpu
        if not self.latencies or not self._began_at:
            raise RuntimeError("no call ended in the window: make it longer (--seconds)")
        ordered = sorted(self.latencies)
        count = len(ordered)
        return Window(
            in_flight=self._cell.in_flight,
            size=self._cell.size,
            calls_per_second=count / ((now - self._began_at) / 1e9),
            p50_us=ordered[count // 2] / 1e3,
            p99_us=ordered[min(count - 1, count * 99 // 100)] / 1e3,
            middle_cpu_us=spent / count * 1e6,
        )


async def keep_asking(ask: Ask, clock: Clock, in_flight: int) -> Window:
    """Runs one window: as many tasks as calls in flight, each asking again as soon as it is answered."""
    figures: list[Window] = []  # the first call that ends after the window closes it

    async def go_on(slot: int) -> None:
        while not figures:
            asked_at = time.perf_counter_ns()
            await ask(slot)
            now = time.perf_counter_ns()
            clock.latencies.append(now - asked_at)
            if now >= clock.begins_at:
                clock.begin(now)
            elif now >= clock.ends_at and len(clock.latencies) >= LEAST_CALLS and not figures:
                figures.append(clock.close(now))

    await asyncio.gather(*(go_on(slot) for slot in range(in_flight)))
    return figures[0]


async def run_cells(prepare: Prepare, options: argparse.Namespace, middle_pid: int) -> None:
    """Runs a window for each cell of a load generator's command line and prints its figures."""
    for cell in options.cells:
        ask = prepare([workload.arguments_json(slot, cell.size) for slot in range(cell.in_flight)])
        clock = Clock(cell, options.warm_up, options.seconds, middle_pid)
        (await keep_asking(ask, clock, cell.in_flight)).print()
