"""Requests the bus's address for drop-in tools, at the start and after each restart of the bus."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from toolbus.errors import PeerLost, RequestError
from toolbus.sdk import Credential, Host

REPLY_SECONDS = 10.0  # timeout of a request to the bus
RETRY_SECONDS = 1.0  # between two requests, if the bus gave no address
RECONNECT_SECONDS = 10.0  # before connecting again to a bus that refused us, or whose operator drained us


async def follow_dropin_address(
    bus: str,
    use: Callable[[str], object],
    log: Callable[[str], object],
    *,
    credential: Credential | None = None,
    retry_seconds: float = RETRY_SECONDS,
    reconnect_seconds: float = RECONNECT_SECONDS,
) -> None:
    """Passes on the bus's address for drop-in tools after each start of the bus; runs until cancelled.

    The request names the port of the previous bus, so that processes which were attached there find it again. If
    another program uses that port, the bus opens another one.

    Args:
        bus: its own address.
        use: takes the address, which may be the same as before.
        log: takes what an operator should know.
        credential: proves who this process is; None means that of TOOLBUS_CREDENTIAL.
        retry_seconds, reconnect_seconds: pauses, see the constants.
    """
    port = 0
    while True:
        try:
            # A source of its own: with a token of the environment, one process would lock the others out.
            async with Host(bus, source=f"toolbus-run:{os.getpid()}", credential=credential) as host:
                async for change in host.watch():
                    if change.full:  # a new connection
                        address = await _request_address(host, port, log, retry_seconds)
                        port = int(address.rpartition(":")[2])
                        use(address)
        except (PeerLost, RequestError) as error:
            log(f"{error} (trying again in {reconnect_seconds:g} s)")
            await asyncio.sleep(reconnect_seconds)


async def _request_address(host: Host, port: int, log: Callable[[str], object], retry_seconds: float) -> str:
    logged = ""
    while True:
        result = await host.call("toolbus:dropin_address", {"port": port}, timeout=REPLY_SECONDS)
        if result.error is None:
            return str(result.output)
        if result.error.message != logged:
            logged = result.error.message
            log(f"the bus gives no address for drop-in tools, trying again each second: {logged}")
        await asyncio.sleep(retry_seconds)
