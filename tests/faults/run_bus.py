"""A bus in a process of its own, to be stopped and killed: ``run_bus.py ADDRESS [SECONDS BETWEEN HEARTBEATS]``."""

from __future__ import annotations

import asyncio
import sys

from toolbus.bus import Bus, Config
from toolbus.protocol.limits import Timings


async def main(address: str, interval: str = "") -> None:
    seconds = float(interval) if interval else None
    timings = Timings()
    if seconds is not None:  # calls end, as sessions, after 20 that were missed: a busy machine may miss 4
        timings = Timings(busy_heartbeat_seconds=seconds, idle_heartbeat_seconds=seconds, missed_heartbeats=20)
    async with Bus(Config(grpc=(address,), http="off", grace_seconds=2.0), timings=timings) as bus:
        print("ready", *bus.grpc_addresses, flush=True)
        await bus.wait_stopped()


asyncio.run(main(*sys.argv[1:]))
