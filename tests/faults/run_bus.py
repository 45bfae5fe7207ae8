"""A bus in a process of its own, to be stopped and killed: ``run_bus.py ADDRESS [SECONDS BETWEEN HEARTBEATS]``."""

from __future__ import annotations

import asyncio
import sys

from toolbus.bus import Bus, Config
from toolbus.protocol.limits import Timings


async def main(address: str, interval: str = "") -> None:
    seconds = float(interval) if interval else None
    timings = Timings() if seconds is None else Timings(busy_heartbeat_seconds=seconds, idle_heartbeat_seconds=seconds)
    async with Bus(Config(grpc=(address,), http="off", grace_seconds=2.0), timings=timings) as bus:
        print("ready", *bus.grpc_addresses, flush=True)
        await bus.wait_stopped()


asyncio.run(main(*sys.argv[1:]))
