"""Offers the fixed set of tools of a client under test (toolbus/conformance/README.md), with peer.py.

    TOOLBUS_ADDRESS=127.0.0.1:PORT python clients/python/conformance.py

Exits with 0 after SIGTERM or a final drain of the bus, with 1 when the bus refused it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from typing import Any

from peer import Call, Peer, Refused

OBJECT: dict[str, Any] = {"type": "object"}


def conformance_peer(address: str) -> Peer:
    """Returns a peer with the seven tools."""
    peer = Peer(address, "conformance")
    meeting: list[asyncio.Future[None]] = []  # calls of `meet` that wait for the others

    @peer.tool("Returns its arguments.", OBJECT)
    async def echo(arguments: dict[str, Any], call: Call) -> Any:
        return arguments

    @peer.tool("Fails with `message`.", OBJECT)
    async def fail(arguments: dict[str, Any], call: Call) -> Any:
        raise ValueError(arguments["message"])

    @peer.tool("Reports progress once, then works until it is cancelled.", OBJECT)
    async def slow(arguments: dict[str, Any], call: Call) -> Any:
        call.progress()
        await asyncio.Event().wait()

    @peer.tool("Reports `count` steps of progress, then returns the count.", OBJECT)
    async def steps(arguments: dict[str, Any], call: Call) -> Any:
        count = arguments["count"]
        for step in range(1, count + 1):
            call.progress(step, count, f"step {step}")
        return {"count": count}

    @peer.tool("Returns once `people` calls of it are at work together.", OBJECT)
    async def meet(arguments: dict[str, Any], call: Call) -> Any:
        arrived = asyncio.get_running_loop().create_future()
        meeting.append(arrived)
        if len(meeting) >= arguments["people"]:
            for each in meeting:
                if not each.done():
                    each.set_result(None)
            meeting.clear()
        await arrived
        return {"met": arguments["people"]}

    @peer.tool("Calls the tool `name` with `arguments` through the bus and returns its output.", OBJECT)
    async def relay(arguments: dict[str, Any], call: Call) -> Any:
        result = await call.invoke(arguments["name"], arguments["arguments"])
        if result.is_error:
            raise RuntimeError(result.error.message)
        return json.loads(result.output_json)

    @peer.tool("Returns the context of its call.", OBJECT)
    async def context(arguments: dict[str, Any], call: Call) -> Any:
        message = call.message.context
        return {"user_id": message.user_id, "attributes": dict(message.attributes)}

    return peer


async def main() -> int:
    """Serves until SIGTERM or a final drain."""
    peer = conformance_peer(os.environ["TOOLBUS_ADDRESS"])
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, peer.drain)
    try:
        await peer.run()
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.ERROR)
    sys.exit(asyncio.run(main()))
