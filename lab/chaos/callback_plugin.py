"""Answers calls over HTTP only: ``python -m lab.chaos.callback_plugin BUS FOLDER PART PORT PUBLIC_PORT``.

It answers at PORT and is registered with PUBLIC_PORT, which may be that of a line. It registers as seldom as the
contract allows, so that a run notices a bus which loses the tool. A registration is valid

- while the bus that accepted it runs (REST-43): a plugin that is killed and started again does not register;
- while the plugin's socket listens that it was made with (REST-44): a plugin that outlives the bus does not register.

Where both have ended, the bus cannot distinguish the plugin from a program that took its port, and the plugin registers
again. A file has the ids of both sockets, for the next process of the plugin.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from lab.ledger import Runs
from lab.load.callbacks import serve_callbacks
from lab.stage import stop_event
from toolbus.common.local_users import listener_id

RETRY_SECONDS = 0.3
REQUEST_SECONDS = 3.0


def sockets_of(*urls: str) -> list[str]:
    """Returns the id of the socket that listens at each URL; empty where none does."""
    return [listener_id((str(url.host), int(url.port or 0))) for url in map(URL, urls)]


def is_valid(made_with: Sequence[str], there: Sequence[str]) -> bool:
    """Returns whether a registration is still valid.

    Args:
        made_with: the sockets of the bus and of the plugin when it was made; empty where it was never made.
        there: those that listen now; an empty id: no socket listens.
    """
    return any(then == now for then, now in zip(made_with, there, strict=False))


async def _stay_registered(session: aiohttp.ClientSession, bus: str, tool: dict[str, Any], registered: Path) -> None:
    """Registers the tool whenever no registration is valid; writes the sockets that it was made with to a file."""
    while True:
        there = sockets_of(bus, tool["callback_url"])
        made_with = registered.read_text("ascii").split("\n") if registered.exists() else []  # noqa: ASYNC240
        if all(there) and not is_valid(made_with, there):
            try:
                async with session.post("/api/tools/register", json=tool) as response:
                    if response.ok:
                        registered.write_text("\n".join(there), "ascii")  # noqa: ASYNC240  # a local folder
            except (aiohttp.ClientError, TimeoutError):
                pass  # the bus does not run
        await asyncio.sleep(RETRY_SECONDS)


async def main(bus: str, folder: str, name: str, port: str, public_port: str) -> None:
    """Serves until it is terminated; then unregisters, where the bus can be reached."""
    stops, runs = stop_event(), Runs(Path(folder), name)

    async def answer(request: web.Request) -> web.Response:
        arguments = (await request.json())["arguments"]
        runs.begin(arguments["token"])
        await asyncio.sleep(arguments.get("seconds", 0.0))
        output = runs.end(arguments["token"])
        if arguments.get("refuse"):
            return web.json_response({"output": None, "is_error": True, "error": "refused on purpose"})
        return web.json_response({"output": output, "is_error": False})

    _, runner = await serve_callbacks(answer, int(port))
    registered = Path(folder) / f"{name}.registered"
    tool = {
        "name": f"{name}_once",
        "description": "Writes down that it ran.",
        "parameters": {"type": "object", "properties": {"token": {"type": "string"}}},
        "callback_url": f"http://127.0.0.1:{public_port}/run",
        "source": name,
        "timeout_seconds": 8,
    }
    async with aiohttp.ClientSession(bus, timeout=aiohttp.ClientTimeout(REQUEST_SECONDS)) as session:
        registering = asyncio.create_task(_stay_registered(session, bus, tool, registered))
        await stops.wait()
        registering.cancel()
        registered.unlink(missing_ok=True)
        try:
            async with session.post("/api/tools/clear", json={"source": name}):
                pass
        except (aiohttp.ClientError, TimeoutError):
            pass  # the bus does not run; a later one finds that the URL does not answer
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
