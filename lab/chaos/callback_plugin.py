"""Answers calls over HTTP only: ``python -m lab.chaos.callback_plugin BUS FOLDER PART PORT PUBLIC_PORT``.

It answers at PORT and is registered with PUBLIC_PORT, which may be that of a line. A file is left once it is
registered; started again after it was killed it registers nothing, since the bus must still have its tool.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from lab.ledger import Runs
from lab.load.callbacks import serve_callbacks
from lab.stage import stop_event

RETRY_SECONDS = 0.3
REQUEST_SECONDS = 3.0


async def _register(session: aiohttp.ClientSession, tool: dict[str, Any], registered: Path) -> None:
    """Registers the tool; tries until the bus takes it, and leaves a file then."""
    while True:
        try:
            async with session.post("/api/tools/register", json=tool) as response:
                if response.ok:
                    registered.touch()  # noqa: ASYNC240  # a local folder
                    return
        except (aiohttp.ClientError, TimeoutError):
            pass  # the bus is away
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
        registering = None if registered.exists() else asyncio.create_task(_register(session, tool, registered))
        await stops.wait()
        if registering is not None:
            registering.cancel()
        registered.unlink(missing_ok=True)
        try:
            async with session.post("/api/tools/clear", json={"source": name}):
                pass
        except (aiohttp.ClientError, TimeoutError):
            pass  # the bus is away: it finds that the URL does not answer
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
