"""A plugin of the callback contract: an HTTP server of aiohttp that answers every call at once.

``python -m lab.benchmarks.callback_plugin [BUS]`` registers its tool with the bus at that URL, if there is one, and
then prints ``attached http=URL``, the URL being its callback's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from lab.benchmarks import workload


def declaration(callback_url: str, name: str = workload.TOOL_NAME, source: str = "bench") -> dict[str, Any]:
    """Returns the body that registers the workload's tool under a name."""
    return {
        "name": name,
        "description": workload.DESCRIPTION,
        "parameters": json.loads(workload.PARAMETERS_JSON),
        "callback_url": callback_url,
        "source": source,
    }


async def register(bus: str, body: dict[str, Any]) -> None:
    """Registers a tool."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{bus}/api/tools/register", json=body) as answer,
    ):
        said = await answer.text()
        if answer.status != 200 or not json.loads(said)["ok"]:
            raise RuntimeError(f"the bus at {bus} did not take the tool: HTTP {answer.status} {said[:500]}")


async def serve(bus: str | None) -> None:
    """Answers until the process is ended."""
    body = f'{{"output":{workload.OUTPUT_JSON},"is_error":false}}'.encode()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    application = web.Application(client_max_size=16 << 20)
    application.router.add_post("/call", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    host, port = runner.addresses[0][:2]
    url = f"http://{host}:{port}/call"
    if bus is not None:
        await register(bus, declaration(url))
    print(f"attached http={url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1] if len(sys.argv) > 1 else None))
