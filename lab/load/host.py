"""Keeps N calls in flight as programs do: ``python -m lab.load.host WAY ADDRESS``.

Ways: ``aiohttp`` and ``httpx`` post callbacks to the plugin at a URL as the bus would, with bodies that are made
beforehand and responses that are not read as JSON; ``aiohttp_json`` writes and reads it, as programs do; ``embedded``
has a bus in this process do it, ``in_process`` has one whose plugin came over gRPC. For these five the CPU time charged
to the calls is that of this process. ``invoke`` calls the bus at a URL; ``bare_invoke`` does so over bare connections,
and ``bare_mcp`` calls the MCP server at a URL; ``json_rpc`` calls a gateway of MCP at a URL, whose token stands behind
a ``#``; ``mount_client`` calls with the client that mounts are made of; ``nats`` makes requests as nats-py's
documentation shows it, ``tcp`` sends lines of text. On the SDK and the event loop of asyncio, ``tasks`` awaits
`Host.call` in N tasks, ``many`` gives `call_many` N calls at a time, ``sync`` has N threads that block in
`SyncHost.call`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from lab.load import windows, workload
from lab.load.raw_http import McpTarget, Target, by_bare_connections
from lab.stage import Stage

if TYPE_CHECKING:
    from toolbus import Bus
    from toolbus.protocol.tool import Result
    from toolbus.sdk import Host

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


def _checked(result: Result) -> None:
    if result.is_error:
        raise RuntimeError(f"a call failed: {result.error}")


def _calling(caller: Bus | Host) -> windows.Prepare:
    async def ask(text: str) -> None:
        _checked(await caller.call(workload.TOOL_NAME, text))

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


@asynccontextmanager
async def by_mount_client(url: str) -> AsyncIterator[windows.Prepare]:
    """Calls an MCP server at the URL as a bus does that has mounted it."""
    from toolbus.parts.mcp.client.connection import McpConnection, open_connection
    from toolbus.parts.mcp.client.http import HttpTransport

    transport = HttpTransport("lab", windows.mcp_url(url), {})
    connection = McpConnection(
        transport, on_request=lambda asked: None, on_notification=lambda *each: None, on_closed=lambda why: None
    )
    await transport.start(connection)
    await open_connection(connection, modern=None)
    tools = (await connection.request("tools/list"))["tools"]
    name = next(tool["name"] for tool in tools if tool["name"].endswith(workload.TOOL_NAME))

    async def ask(arguments: object) -> None:
        result = await connection.request("tools/call", {"name": name, "arguments": arguments}, name=name)
        if result.get("isError"):
            raise RuntimeError(f"a call failed: {result}")

    yield windows.preparing(windows.read_json, ask)
    await connection.close()


@asynccontextmanager
async def by_nats(url: str) -> AsyncIterator[windows.Prepare]:
    import nats

    client = await nats.connect(url, allow_reconnect=False)

    async def ask(text: str) -> None:
        await client.request(workload.SUBJECT, text.encode(), timeout=10)

    yield windows.preparing(list, ask)
    await client.close()


@asynccontextmanager
async def by_tcp(address: str) -> AsyncIterator[windows.Prepare]:
    """Sends lines of text, which have no id but their slot."""
    reader, writer = await workload.connect(address)
    waiting: dict[bytes, asyncio.Future[None]] = {}

    async def read() -> None:
        while line := await reader.readline():
            waiting.pop(line.partition(b" ")[0]).set_result(None)

    def write(texts: Sequence[str]) -> list[tuple[bytes, bytes]]:
        return [(str(slot).encode(), f"{slot} {text}\n".encode()) for slot, text in enumerate(texts)]

    async def ask(body: tuple[bytes, bytes]) -> None:
        slot, line = body
        answered = waiting[slot] = asyncio.get_running_loop().create_future()
        writer.write(line)
        await answered

    reading = asyncio.create_task(read())
    yield windows.preparing(write, ask)
    reading.cancel()
    writer.close()


# -- on the SDK ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def by_tasks(address: str) -> AsyncIterator[windows.Prepare]:
    """Calls in as many tasks as calls in flight."""
    from toolbus.sdk import Host

    async with Host(address, max_in_flight=windows.MAX_IN_FLIGHT) as host:
        yield _calling(host)


async def call_many(options: argparse.Namespace) -> None:
    """Makes as many calls as there are in flight at once, again and again."""
    from toolbus.sdk import Host

    async with Host(options.address, max_in_flight=windows.MAX_IN_FLIGHT) as host:
        for cell in options.cells:
            calls = [(workload.TOOL_NAME, text) for text in windows.arguments(cell)]
            clock = windows.Clock(cell, options, options.middle_pid)
            while not clock.is_over:
                began_at = time.perf_counter_ns()
                for result in await host.call_many(calls):
                    _checked(result)
                clock.ended(began_at, time.perf_counter_ns(), len(calls))
            clock.window.print()


def call_in_threads(options: argparse.Namespace) -> None:
    """Calls in as many threads as calls in flight."""
    from toolbus.sdk import SyncHost

    guard = threading.Lock()
    failures: list[Exception] = []
    with SyncHost(options.address, max_in_flight=windows.MAX_IN_FLIGHT) as host:

        def call_again(clock: windows.Clock, text: str) -> None:
            try:
                while not clock.is_over and not failures:
                    began_at = time.perf_counter_ns()
                    _checked(host.call(workload.TOOL_NAME, text))
                    with guard:
                        clock.ended(began_at, time.perf_counter_ns())
            except Exception as error:
                failures.append(error)

        for cell in options.cells:
            clock = windows.Clock(cell, options, options.middle_pid)
            threads = [threading.Thread(target=call_again, args=(clock, text)) for text in windows.arguments(cell)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]
            clock.window.print()


WAYS: dict[str, Callable[[str], AbstractAsyncContextManager[windows.Prepare]]] = {
    "aiohttp": by_aiohttp,
    "aiohttp_json": by_aiohttp_json,
    "httpx": by_httpx,
    "embedded": by_embedded_bus,
    "in_process": by_bus_of_this_process,
    "invoke": by_invoke,
    "bare_invoke": partial(by_bare_connections, kind=Target),
    "bare_mcp": partial(by_bare_connections, kind=McpTarget),
    "json_rpc": by_json_rpc,
    "mount_client": by_mount_client,
    "nats": by_nats,
    "tcp": by_tcp,
    "tasks": by_tasks,
}
ALONE = ("aiohttp", "aiohttp_json", "httpx", "embedded", "in_process")  # whose own CPU time is charged
SDK = ("tasks", "many", "sync")


async def call(way: str, options: argparse.Namespace) -> None:
    async with WAYS[way](options.address) as prepare:
        await windows.run_cells(prepare, options, 0 if way in ALONE else options.middle_pid)


def run(way: str, options: argparse.Namespace) -> None:
    if way == "sync":
        call_in_threads(options)
    else:
        calling = call_many(options) if way == "many" else call(way, options)
        (asyncio.run if way in SDK else uvloop.run)(calling)


if __name__ == "__main__":
    run(workload.choose_transport(sys.argv[1]), windows.options_of(__doc__).parse_args(sys.argv[2:]))
