"""Keeps N calls in flight over HTTP, or with a bus of its own: ``python -m lab.load.rest_host WAY URL``.

Ways: ``aiohttp`` and ``httpx`` post callbacks to the plugin at the URL as the bus would, with bodies that are made
beforehand and responses that are not read as JSON; ``aiohttp_json`` writes and reads it, as programs do; ``embedded``
has a bus in this process do it, ``in_process`` has one whose plugin came over gRPC; ``invoke`` calls the bus at the
URL; ``json_rpc`` calls a gateway of MCP at the URL, whose token stands behind a ``#``. For all but the last two the CPU
time charged to the calls is that of this process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import uvloop

from lab.load import windows, workload
from lab.stage import Stage

if TYPE_CHECKING:
    from toolbus import Bus

POOL = 20  # connections of the program that the bus replaces
RESPONSE_SECONDS = 10.0
SUCCEEDED = b'"is_error":false'
CALLBACK = f'{{"name":"{workload.TOOL_NAME}","arguments":%s,"call_id":"%d","raw_arguments":"%s"}}'
INVOCATION = f'{{"name":"{workload.TOOL_NAME}","arguments":%s}}'
TOOL_OF_GATEWAY = f"bench-{workload.TOOL_NAME}"
RPC = f'{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{TOOL_OF_GATEWAY}","arguments":%s}}}}'


def callback_bodies(texts: Sequence[str]) -> list[bytes]:
    """Returns the body of a callback for each slot."""
    return [(CALLBACK % (text, slot, text.replace('"', '\\"'))).encode() for slot, text in enumerate(texts)]


def check(status: int, body: bytes, mark: bytes = SUCCEEDED) -> None:
    """Ends the run where a call failed."""
    if status != 200 or mark not in body:
        raise RuntimeError(f"a call failed: HTTP {status} {body[:500]!r}")


@asynccontextmanager
async def by_aiohttp(
    url: str, write: Callable[[Sequence[str]], list[bytes]] = callback_bodies, mark: bytes = SUCCEEDED, token: str = ""
) -> AsyncIterator[windows.Prepare]:
    """Posts with aiohttp over keep-alive connections, as many as calls are in flight."""
    import aiohttp

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(body: bytes) -> None:
            async with session.post(url, data=body, headers=headers) as answer:
                check(answer.status, await answer.read(), mark)

        yield windows.preparing(write, ask)


@asynccontextmanager
async def by_aiohttp_json(url: str) -> AsyncIterator[windows.Prepare]:
    """Posts with aiohttp as a program would that has arguments and wants a result: writes and reads JSON each time."""
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(body: object) -> None:
            async with session.post(url, json=body, allow_redirects=False) as answer:
                result = await answer.json()
                if answer.status != 200 or result["is_error"]:
                    raise RuntimeError(f"a call failed: HTTP {answer.status} {result!r}")

        yield windows.preparing(lambda texts: [json.loads(body) for body in callback_bodies(texts)], ask)


@asynccontextmanager
async def by_httpx(url: str) -> AsyncIterator[windows.Prepare]:
    """Posts with httpx over a pool of 20 connections."""
    import httpx

    headers = {"Content-Type": "application/json"}
    limits = httpx.Limits(max_connections=POOL)
    async with httpx.AsyncClient(limits=limits, timeout=RESPONSE_SECONDS, trust_env=False, verify=False) as client:

        async def ask(body: bytes) -> None:
            answer = await client.post(url, content=body, headers=headers)
            check(answer.status_code, answer.content)

        yield windows.preparing(callback_bodies, ask)


def _calling(bus: Bus) -> windows.Prepare:
    async def ask(text: str) -> None:
        result = await bus.call(workload.TOOL_NAME, text)
        if result.is_error:
            raise RuntimeError(f"a call failed: {result.error}")

    return windows.preparing(list, ask)


@asynccontextmanager
async def by_embedded_bus(url: str) -> AsyncIterator[windows.Prepare]:
    """Calls a tool of a bus in this process, which has it from a plugin at the URL."""
    from lab.load.callbacks import declaration, register_at
    from toolbus.testing import running_bus

    async with running_bus(http="127.0.0.1:0") as bus:
        await register_at(f"http://{bus.http_address}", declaration(url))
        yield _calling(bus)


@asynccontextmanager
async def by_bus_of_this_process(url: str) -> AsyncIterator[windows.Prepare]:
    """Calls a tool of a bus in this process, which has it from a plugin of another that came over gRPC."""
    from toolbus.testing import running_bus

    async with running_bus() as bus:
        with Stage() as stage:
            plugin = stage.module("load.plugin", bus.grpc_addresses[0])
            await asyncio.to_thread(plugin.line)
            yield _calling(bus)


def by_invoke(url: str) -> AbstractAsyncContextManager[windows.Prepare]:
    """Posts calls to the bus at the URL."""
    return by_aiohttp(f"{url}/api/tools/invoke", lambda texts: [(INVOCATION % text).encode() for text in texts])


def by_json_rpc(url: str) -> AbstractAsyncContextManager[windows.Prepare]:
    """Posts calls to the gateway at the URL."""
    place, _, token = url.partition("#")
    return by_aiohttp(place, lambda texts: [(RPC % text).encode() for text in texts], b'"isError":false', token)


WAYS: dict[str, Callable[[str], AbstractAsyncContextManager[windows.Prepare]]] = {
    "aiohttp": by_aiohttp,
    "aiohttp_json": by_aiohttp_json,
    "httpx": by_httpx,
    "embedded": by_embedded_bus,
    "in_process": by_bus_of_this_process,
    "invoke": by_invoke,
    "json_rpc": by_json_rpc,
}
OTHERS_CHARGED = ("invoke", "json_rpc")


async def main() -> None:
    """Reads the command line and runs a window for each cell."""
    way = sys.argv[1]
    options = windows.options_of(__doc__).parse_args(sys.argv[2:])
    async with WAYS[way](options.address) as prepare:
        await windows.run_cells(prepare, options, options.middle_pid if way in OTHERS_CHARGED else 0)


if __name__ == "__main__":
    uvloop.run(main())
