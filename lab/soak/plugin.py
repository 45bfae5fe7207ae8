"""Runs the plugins that stay, one on the SDK and one that knows HTTP only: ``python -m lab.soak.plugin GRPC HTTP``."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import uvloop
from aiohttp import web

from lab.load.callbacks import register_at, serve_callbacks
from lab.stage import stop_event
from toolbus.sdk import Err, Plugin, ToolScope

SOURCE, CALLBACK_SOURCE = "steady", "steady-callback"
ANSWER, SLOW, REPORT, NEST, REFUSE = "steady_answer", "steady_slow", "steady_report", "steady_nest", "steady_refuse"
CALLBACK = "steady_callback"
TOOLS = (ANSWER, SLOW, REPORT, NEST, REFUSE, CALLBACK)
SLOW_SECONDS = 0.2
MAX_IN_FLIGHT = 4096  # what a second of calls needs that a busy machine has delayed
PLACE = {"type": "object", "properties": {"number": {"type": "integer"}}}


async def answer(number: int) -> dict[str, int]:
    return {"number": number}


async def slow(number: int) -> dict[str, int]:
    await asyncio.sleep(SLOW_SECONDS)
    return {"number": number}


async def report(scope: ToolScope, number: int) -> dict[str, int]:
    for step in range(3):
        scope.progress(step, total=3, message=f"step {step}")
        await asyncio.sleep(0.01)
    return {"number": number}


async def nest(scope: ToolScope, number: int) -> Any:
    return (await scope.call(ANSWER, {"number": number})).unwrap()


async def refuse(number: int) -> Any:
    return Err(f"{number} is refused on purpose")


async def answer_callback(request: web.Request) -> web.Response:
    call = await request.json()
    return web.json_response({"output": call["arguments"], "is_error": False})


async def main(grpc: str, http: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    stops = stop_event()
    plugin = Plugin(SOURCE, address=grpc, max_in_flight=MAX_IN_FLIGHT)
    for name, function in ((ANSWER, answer), (SLOW, slow), (REPORT, report), (NEST, nest), (REFUSE, refuse)):
        plugin.tool(name=name, description="Stays.")(function)
    async with plugin:
        await plugin.ready()
        url = (await serve_callbacks(answer_callback)).url
        tool = {"name": CALLBACK, "description": "Stays.", "parameters": PLACE, "source": CALLBACK_SOURCE}
        await register_at(f"http://{http}", {**tool, "callback_url": url})
        await stops.wait()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
