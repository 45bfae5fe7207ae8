"""A bus on a thread of its own, for test tools that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.testing import running_bus


@contextmanager
def bus_on_thread(**settings: Any) -> Iterator[Bus]:
    """Runs a bus with a gateway; only its addresses may be used from here."""
    running = threading.Event()
    found: list[tuple[Bus, asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        async with running_bus(http="127.0.0.1:0", grace_seconds=0, **settings) as bus:
            found.append((bus, asyncio.get_running_loop(), asyncio.Event()))
            running.set()
            await found[0][2].wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="bus", daemon=True)
    thread.start()
    assert running.wait(WAIT_SECONDS), "the bus did not start"
    bus, loop, stop = found[0]
    try:
        yield bus
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
