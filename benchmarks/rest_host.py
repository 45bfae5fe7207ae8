"""The host process of a run over HTTP: ``python -m benchmarks.rest_host WAY URL``.

Ways: ``aiohttp`` and ``httpx`` post callbacks to the plugin at the URL as the bus would, with bodies that are made
beforehand and answers that are not read as JSON; ``aiohttp_json`` writes and reads it, as programs do; ``embedded``
has a bus in this process do it; ``invoke`` asks the bus at the URL. For all but ``invoke`` the CPU time charged to the
calls is that of this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import uvloop

from benchmarks import load_host, window, workload

Ask = Callable[[int], Awaitable[None]]

POOL = 20  # connections of the program whose callbacks the bus takes over
PATIENCE_SECONDS = 10.0


def callback_bodies() -> list[bytes]:
    """Returns the body of a callback for each slot."""
    begin = f'{{"name":"{workload.TOOL_NAME}","arguments":%s,"call_id":"%d","raw_arguments":"%s"}}'
    texts = [workload.arguments_json(slot) for slot in range(workload.MAX_IN_FLIGHT)]
    return [(begin % (text, slot, text.replace('"', '\\"'))).encode() for slot, text in enumerate(texts)]


def check(status: int, body: bytes) -> None:
    """Ends the run where a call failed."""
    if status != 200 or b'"is_error":false' not in body:
        raise RuntimeError(f"a call failed: HTTP {status} {body[:500]!r}")


@asynccontextmanager
async def by_aiohttp(url: str, bodies: list[bytes] | None = None) -> AsyncIterator[Ask]:
    """Posts with aiohttp over kept connections, as many as calls are in flight."""
    import aiohttp

    ready = bodies or callback_bodies()
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(slot: int) -> None:
            async with session.post(url, data=ready[slot], headers=headers) as answer:
                check(answer.status, await answer.read())

        yield ask


@asynccontextmanager
async def by_aiohttp_json(url: str) -> AsyncIterator[Ask]:
    """Posts with aiohttp as a program would that has arguments and wants a result: writes and reads JSON each time."""
    import aiohttp

    ready = [json.loads(body) for body in callback_bodies()]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(slot: int) -> None:
            async with session.post(url, json=ready[slot], allow_redirects=False) as answer:
                result = await answer.json()
                if answer.status != 200 or result["is_error"]:
                    raise RuntimeError(f"a call failed: HTTP {answer.status} {result!r}")

        yield ask


@asynccontextmanager
async def by_httpx(url: str) -> AsyncIterator[Ask]:
    """Posts with httpx over a pool of 20 connections."""
    import httpx

    ready = callback_bodies()
    headers = {"Content-Type": "application/json"}
    limits = httpx.Limits(max_connections=POOL)
    async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_SECONDS, trust_env=False) as client:

        async def ask(slot: int) -> None:
            answer = await client.post(url, content=ready[slot], headers=headers)
            check(answer.status_code, answer.content)

        yield ask


@asynccontextmanager
async def by_embedded_bus(url: str) -> AsyncIterator[Ask]:
    """Calls a tool of a bus in this process, which has it from a plugin at the URL."""
    from benchmarks.callback_plugin import register
    from toolbus.testing import running_bus

    texts = [workload.arguments_json(slot) for slot in range(workload.MAX_IN_FLIGHT)]
    async with running_bus(http="127.0.0.1:0") as bus:
        await register(f"http://{bus.http_address}", url)

        async def ask(slot: int) -> None:
            result = await bus.call(workload.TOOL_NAME, texts[slot])
            if result.is_error:
                raise RuntimeError(f"a call failed: {result.error}")

        yield ask


def by_invoke(url: str) -> AbstractAsyncContextManager[Ask]:
    """Posts calls to the bus at the URL."""
    begin = f'{{"name":"{workload.TOOL_NAME}","arguments":%s}}'
    bodies = [(begin % workload.arguments_json(slot)).encode() for slot in range(workload.MAX_IN_FLIGHT)]
    return by_aiohttp(f"{url}/api/tools/invoke", bodies)


WAYS: dict[str, Callable[[str], AbstractAsyncContextManager[Ask]]] = {
    "aiohttp": by_aiohttp,
    "aiohttp_json": by_aiohttp_json,
    "httpx": by_httpx,
    "embedded": by_embedded_bus,
    "invoke": by_invoke,
}


async def main() -> None:
    """Reads the command line and runs a window for each number of calls in flight."""
    way = sys.argv[1]
    options = load_host.options_of(__doc__).parse_args(sys.argv[2:])
    charged = options.middle_pid if way == "invoke" else os.getpid()
    async with WAYS[way](options.address) as ask:
        for in_flight in options.in_flight:
            clock = window.Clock(in_flight, options.warm_up, options.seconds, charged)
            (await window.keep_asking(ask, clock, in_flight)).print()


if __name__ == "__main__":
    uvloop.run(main())
