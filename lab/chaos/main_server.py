"""Runs the main server above the bus, which calls what is registered with it.

``python -m lab.chaos.main_server PORT FOLDER SEED GENERATION``. It forgets everything when it is killed.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sys
from pathlib import Path

import aiohttp

from lab.chaos.cast import TIMEOUT_SECONDS
from lab.chaos.host import RESPONSE_SECONDS
from lab.chaos.load import Order, call_until_terminated
from lab.ledger import CALLS, Ledger
from lab.load.callers import Reply, failed
from tests.parts.moving.upstream.main_server import MainServer

NAME = "main-server"
LOOK_SECONDS = 0.05


async def _call(server: MainServer, session: aiohttp.ClientSession, order: Order) -> Reply:
    """Calls one of the tools that there are now, at the URL that the bus registered."""
    body = server.tools["default"].get(order.tool)
    if body is None:
        return Reply("AWAY", stage="NOT_DISPATCHED")
    call = {"name": order.tool, "arguments": order.arguments, "call_id": order.token}
    call["raw_arguments"] = json.dumps(order.arguments)
    timeout = aiohttp.ClientTimeout(order.timeout + RESPONSE_SECONDS)
    try:
        async with session.post(body["callback_url"], json=call, timeout=timeout) as response:
            answer = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, ValueError) as failure:
        return failed(failure)
    if answer.get("is_error"):
        return Reply("TOOL" if order.refuse else str(answer["error"]), message=str(answer["output"])[:200])
    return Reply("OK", answer.get("output"))


async def main(port: str, folder: str, seed: str, generation: str, *tools: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    server = MainServer()
    server.port = int(port)
    async with server, aiohttp.ClientSession() as session:
        while not set(tools) <= set(server.tools["default"]):
            await asyncio.sleep(LOOK_SECONDS)  # the bus registers them as soon as it sees this server
        call, ledger = functools.partial(_call, server, session), Ledger(Path(folder) / CALLS)
        life = (seed, generation)
        await call_until_terminated(call, ledger, NAME, life, tools, own_timeout=TIMEOUT_SECONDS)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
