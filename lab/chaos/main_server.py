"""Runs the main server above the bus, which calls what is registered with it.

``python -m lab.chaos.main_server PORT FOLDER SEED GENERATION``. It forgets everything when it is killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from pathlib import Path

import httpx

from lab.chaos.callers import RESPONSE_SECONDS
from lab.chaos.cast import PARTS, TIMEOUT_SECONDS
from lab.chaos.load import Load, Order, Reply, orders
from lab.ledger import CALLS, Ledger
from tests.bus.upstream.main_server import MainServer

NAME = "main-server"
LOOK_SECONDS = 0.05


class CallbackCaller:
    """Calls tools at the URLs that the bus registered."""

    def __init__(self, server: MainServer) -> None:
        self._server = server
        self._client = httpx.AsyncClient(trust_env=False)

    async def call(self, order: Order) -> Reply:
        """Calls one of the tools that there are now."""
        body = self._server.tools["default"].get(order.tool)
        if body is None:
            return Reply("AWAY", stage="NOT_DISPATCHED")
        call = {
            "name": order.tool,
            "arguments": order.arguments,
            "call_id": order.token,
            "raw_arguments": json.dumps(order.arguments),
        }
        try:
            posted = await self._client.post(body["callback_url"], json=call, timeout=order.timeout + RESPONSE_SECONDS)
            answer = posted.json()
        except httpx.ConnectError:
            return Reply("AWAY", stage="NOT_DISPATCHED")
        except (httpx.TransportError, ValueError) as error:
            return Reply("LOST", stage="UNKNOWN", message=f"{type(error).__name__}: {error}")
        if answer.get("is_error"):
            return Reply("TOOL" if order.refuse else str(answer["error"]), message=str(answer["output"])[:200])
        return Reply("OK", (answer.get("output") or {}).get("ran"))

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()


async def main(port: str, folder: str, seed: str, generation: str, *tools: str) -> None:
    """Serves and calls until it is terminated."""
    logging.basicConfig(level=logging.WARNING)
    server = MainServer()
    server.port = int(port)
    part = next(part for part in PARTS if part.name == NAME)
    async with server:
        while not set(tools) <= set(server.tools["default"]):
            await asyncio.sleep(LOOK_SECONDS)  # the bus registers them as soon as it sees this server
        drawn = f"{seed}/{NAME}/{generation}"
        load = Load(Ledger(Path(folder) / CALLS), NAME, CallbackCaller(server))
        calls = orders(drawn, f"{NAME}.{generation}", tools, own_timeout=TIMEOUT_SECONDS)
        await load.run(calls, part.rate, random.Random(drawn))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
