"""Runs a bus in this process while a host and a plugin in two others keep it busy, and reads what a call costs it.

The bus is here so that the processor's clocks can be read: of the process, and of one of its threads. What measures
does next to nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from lab.benchmarks.facts import Column, Measured
from lab.child import READY_SECONDS, ChildFailed
from lab.load.windows import Cell
from lab.stage import Stage, until_async
from toolbus.bus import Bus
from toolbus.testing import running_bus

IN_FLIGHT = 64
PROCESSOR_TIME: Column = (f"processor time of a call, {IN_FLIGHT} in flight", "µs")
WINDOW_SECONDS = 2.0
SETTLE_SECONDS = 1.3  # before a window, until what the window before has left is done
# Longer than any run. The host forgets the latencies of a window that has ended.
_HOST = ("--cells", ",".join([str(Cell(IN_FLIGHT))] * 200), "--seconds", "10", "--warm-up", "0")


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
            if not await until_async(lambda: bus.core.calls.records.outcomes[0], READY_SECONDS):
                raise ChildFailed(f"no call has ended in {READY_SECONDS:g} s")
            yield bus
        finally:
            gc.unfreeze()
            await asyncio.to_thread(processes.close)  # while the bus runs: they detach


async def spent(bus: Bus, thread: str = "") -> Measured:
    """Lets the bus settle, and returns what a call costs it in the window after that.

    Args:
        thread: the name of a thread whose share is measured, too.
    """
    await asyncio.sleep(SETTLE_SECONDS)
    before = _clocks(bus, thread)
    await asyncio.sleep(WINDOW_SECONDS)
    calls, seconds, of_thread = (late - early for early, late in zip(before, _clocks(bus, thread), strict=True))
    if not calls:
        raise RuntimeError(f"no call has ended in a window of {WINDOW_SECONDS:g} s")
    share = {(f"share of the thread {thread}", "%"): [100.0 * of_thread / seconds]} if thread else {}
    return {PROCESSOR_TIME: [seconds / calls * 1e6], **share}


def _clocks(bus: Bus, thread: str) -> tuple[float, float, float]:
    """Returns how many calls have ended, and the processor time so far: of all threads, and of the named one."""
    threads = (each.ident or 0 for each in threading.enumerate() if each.name == thread)
    of_thread = sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in threads)
    return bus.core.calls.records.outcomes[0], time.process_time(), of_thread
