"""A bus in a process of its own, to be stopped and killed: ``run_bus.py ADDRESS [SECONDS BETWEEN HEARTBEATS]``."""

from __future__ import annotations

import asyncio
import sys

from toolbus import session
from toolbus.bus import Bus, Config


async def main(address: str, interval: str = "") -> None:
    if interval:
        session.BUSY_INTERVAL = float(interval)
        session.IDLE_INTERVAL = float(interval)
    async with Bus(Config(grpc=(address,), http="off", grace_seconds=2.0)) as bus:
        print("ready", *bus.grpc_addresses, flush=True)
        await bus.wait_stopped()


asyncio.run(main(*sys.argv[1:]))
