"""Runs a bus in this process while a host and a plugin in two others keep it busy, and reads what a call costs it.

The bus is here so that the processor's clocks can be read: of the process, and of one of its threads. What measures
does next to nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any, NamedTuple, Self

from lab.child import READY_SECONDS
from lab.load.windows import Cell
from lab.stage import LOOK_SECONDS, Stage
from toolbus.bus import Bus
from toolbus.testing import running_bus

IN_FLIGHT = 64
WINDOW_SECONDS = 2.0
SETTLE_SECONDS = 1.3  # before a window, until what the window before has left is done
# Longer than any run. The host forgets the latencies of a window that has ended.
_HOST = ("--cells", ",".join([str(Cell(IN_FLIGHT))] * 200), "--seconds", "10", "--warm-up", "0")


class Spent(NamedTuple):
    """What the bus has spent in a window.

    Attributes:
        seconds: of the processor, by all threads.
        of_thread: those of one thread; 0 where there is none.
    """

    calls: int
    seconds: float
    of_thread: float

    @property
    def microseconds(self) -> float:
        return self.seconds / self.calls * 1e6

    @classmethod
    def so_far(cls, bus: Bus, clock: int | None) -> Self:
        of_thread = time.clock_gettime(clock) if clock is not None else 0.0
        return cls(bus.core.records.outcomes[0], time.process_time(), of_thread)


@asynccontextmanager
async def busy_bus(stage: Stage, **settings: Any) -> AsyncIterator[Bus]:
    """Runs a bus that has calls in flight all the time; `settings` are those of `running_bus`."""
    async with running_bus(**settings) as bus:
        processes = ExitStack()
        own = processes.enter_context(Stage(stage.environment, stage.lifeline))
        try:
            await asyncio.to_thread(own.module("load.plugin", bus.grpc_addresses[0]).line)
            gc.collect()
            gc.freeze()  # as a bus does that is served
            own.module("load.stream_host", bus.grpc_addresses[0], *_HOST)
            async with asyncio.timeout(READY_SECONDS):
                while not bus.core.records.outcomes[0]:
                    await asyncio.sleep(LOOK_SECONDS)
            yield bus
        finally:
            gc.unfreeze()
            await asyncio.to_thread(processes.close)  # while the bus runs: they detach


async def spent(bus: Bus, clock: int | None = None) -> Spent:
    """Lets the bus settle, and returns what it spends in the window after that.

    Args:
        clock: of a thread, as `clock_of` returns it.
    """
    await asyncio.sleep(SETTLE_SECONDS)
    before = Spent.so_far(bus, clock)
    await asyncio.sleep(WINDOW_SECONDS)
    after = Spent.so_far(bus, clock)
    calls = after.calls - before.calls
    if not calls:
        raise RuntimeError(f"no call has ended in a window of {WINDOW_SECONDS:g} s")
    return Spent(calls, after.seconds - before.seconds, after.of_thread - before.of_thread)


def clock_of(name: str) -> int:
    """Returns the processor's clock of the thread with a name."""
    return next(time.pthread_getcpuclockid(each.ident or 0) for each in threading.enumerate() if each.name == name)


def in_turns(first: str, second: str, pairs: int) -> Iterator[str]:
    """Yields both of each pair, in changing order."""
    for number in range(pairs):
        yield from (second, first) if number % 2 else (first, second)
