"""Serves callbacks over HTTP as plugins do that know nothing else, and registers their tools with a bus."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from lab.load import workload

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CallbackServer(NamedTuple):
    """A server of callbacks: the URL of one, and what ends it once the calls in flight are answered."""

    url: str
    runner: web.AppRunner


async def serve_callbacks(answer: Answer, port: int = 0) -> CallbackServer:
    """Answers POST at any path of a port of loopback."""
    application = web.Application(client_max_size=16 << 20)
    application.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    host, port = runner.addresses[0][:2]
    return CallbackServer(f"http://{host}:{port}/call", runner)


async def answer_at_once(request: web.Request) -> web.Response:
    await request.read()
    return workload_response()


def workload_response() -> web.Response:
    """Returns the workload's result as a callback's response."""
    body = b'{"output":%s,"is_error":false}' % workload.OUTPUT_JSON.encode()
    return web.Response(body=body, content_type="application/json")


def declaration(callback_url: str, name: str = workload.TOOL_NAME, source: str = "bench") -> dict[str, Any]:
    """Returns the body that registers the workload's tool under a name."""
    return {
        "name": name,
        "description": workload.DESCRIPTION,
        "parameters": json.loads(workload.PARAMETERS_JSON),
        "callback_url": callback_url,
        "source": source,
    }


async def register(session: aiohttp.ClientSession, body: dict[str, Any], bus: str = "") -> None:
    """Registers a tool.

    Args:
        bus: the URL of the bus, where the session has none.
    """
    async with session.post(f"{bus}/api/tools/register", json=body) as response:
        text = await response.text()
        if response.status != 200 or not json.loads(text)["ok"]:
            raise RuntimeError(f"the bus did not register the tool: HTTP {response.status} {text[:500]}")


async def register_at(bus: str, body: dict[str, Any]) -> None:
    """Registers one tool with the bus at a URL."""
    async with aiohttp.ClientSession() as session:
        await register(session, body, bus)
