"""Where a bus takes drop-in tools in: asks the bus, and again after each of its restarts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from toolbus.errors import PeerLost, RequestError
from toolbus.sdk import Host

ASK_SECONDS = 10.0  # for the bus to answer
AGAIN_SECONDS = 1.0  # between two questions where it did not
SENT_AWAY_SECONDS = 10.0  # before coming back where it refuses us, or an operator asked us to go


async def follow_entrance(bus: str, found: Callable[[str], object], say: Callable[[str], object]) -> None:
    """Tells the address at which a bus takes drop-in tools in, each time that the bus is there anew; for ever.

    A bus that was started again is asked for the port of the one before it, so that processes which are attached there
    find it again. Where that is in use, it tells another one.

    Args:
        bus: its own address.
        found: takes the address, perhaps the same one again.
        say: takes what an operator should know.
    """
    port = 0
    while True:
        try:
            # A source of its own: with a token of the environment, one process would keep the others out.
            async with Host(bus, source=f"toolbus-run:{os.getpid()}") as host:
                async for change in host.watch():
                    if change.full:  # a new connection
                        address = await _asked(host, port, say)
                        port = int(address.rpartition(":")[2])
                        found(address)
        except (PeerLost, RequestError) as problem:
            say(f"{problem} (trying again in {SENT_AWAY_SECONDS:g} s)")
            await asyncio.sleep(SENT_AWAY_SECONDS)


async def _asked(host: Host, port: int, say: Callable[[str], object]) -> str:
    said = ""
    while True:
        result = await host.call("toolbus:dropin_address", {"port": port}, timeout=ASK_SECONDS)
        if result.error is None:
            return str(result.output)
        if result.error.message != said:
            said = result.error.message
            say(f"the bus does not say where it takes drop-in tools in, it is asked again: {said}")
        await asyncio.sleep(AGAIN_SECONDS)
