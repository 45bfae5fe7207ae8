"""Connections towards programs of this machine: kept for the next request, and no more of them than are needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from tests.bus.gateway.calling import client
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import outbound
from toolbus.testing import running_bus


async def test_of_the_connections_of_a_busy_moment_only_one_is_used_by_calls_one_after_the_other() -> None:
    used: Counter[int] = Counter()  # requests by connection

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        used[request.transport.get_extra_info("peername")[1]] += 1
        await asyncio.sleep(0.01)
        return web.Response()

    application = web.Application()
    application.router.add_get("/", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    seconds = 2.0  # longer than a busy machine stands still
    async with outbound.open_session(connections=0, seconds=5.0, keep_alive_seconds=seconds) as session:

        async def ask() -> None:
            async with session.get(url) as response:
                await response.read()

        await asyncio.gather(*(ask() for _ in range(8)))
        assert len(used) == 8
        await asyncio.sleep(1.5 * outbound.TRIAL_SECONDS)
        used.clear()
        for _ in range(20):
            await ask()
        assert [*used.values()] == [20]
        async with asyncio.timeout(WAIT_SECONDS):
            while len(runner.server.connections if runner.server else ()) > 1:  # the others are closed, being idle
                await ask()
        assert len(used) == 1
    await runner.cleanup()


@pytest.mark.parametrize("server_seconds", [0.5, 1.0, 2.0, 5.0], ids=["0.5", "1", "gunicorn", "node and uvicorn"])
async def test_a_connection_that_its_server_may_close_is_not_used_again(server_seconds: float) -> None:
    """The end and the request cross: a server reads nothing from a connection that was idle for its limit."""
    lost = 0
    clock = asyncio.get_running_loop().time

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lost
        answered = clock()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                if clock() - answered >= server_seconds:
                    lost += 1
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                answered = clock()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with outbound.open_session(connections=0, seconds=WAIT_SECONDS) as session:
        for pause in (0.1, server_seconds + 0.1, 0.0):
            async with session.post(url) as response:
                assert await response.text() == "ok"
            await asyncio.sleep(pause)
    server.close()
    assert lost == 0


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n"
BODY = b'{"output": 1}'
# What a server sends, after how many responses it closes, and how many seconds after the last
CLOSING = {
    "at once": (OK, 1, 0.0),
    "a little later": (OK, 1, 0.002),
    "after the third": (OK, 3, 0.0),
    "says so": (OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), 1, 0.0),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\n", 1, 0.0),
    "HTTP/1.0 with a length": (OK.replace(b"1.1", b"1.0"), 1, 0.0),
    "keeps it": (OK, 1000, 0.0),
}


def closing(way: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    head, responses, seconds = CLOSING[way]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for _ in range(responses):
                asked = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(asked.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                writer.write(head + BODY)
                await writer.drain()
            await asyncio.sleep(seconds)
        writer.close()

    return serve


async def test_no_call_is_lost_whichever_way_servers_close_connections() -> None:
    async with running_bus(http="127.0.0.1:0") as bus, client(bus) as http, AsyncExitStack() as stack:
        ways = list(CLOSING)
        for number, way in enumerate(ways):
            server = await stack.enter_async_context(await asyncio.start_server(closing(way), "127.0.0.1", 0))
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            await http.post("/api/tools/register", json={"name": f"t{number}", "callback_url": url})

        clock = asyncio.get_running_loop().time

        async def calls(number: int) -> None:
            answered = clock()
            for _ in range(40):
                result = await bus.call(f"t{number}")
                paused = clock() - answered > outbound.TRIAL_SECONDS / 2  # this machine stood still, also meanwhile
                answered = clock()
                assert result.output == 1 or paused, (ways[number], result.error)

        await asyncio.gather(*map(calls, range(len(ways))))


async def test_a_server_that_ended_idle_connections_is_asked_on_new_ones_then() -> None:
    used: list[int] = []  # the connection of each request

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            while True:
                async with asyncio.timeout(0.15):
                    await reader.readuntil(b"\r\n\r\n")
                used.append(writer.get_extra_info("peername")[1])
                writer.write(OK + BODY)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with outbound.open_session(connections=0, seconds=WAIT_SECONDS) as session:
        for pause in (0.3, 0.3, 0.1, 0.1, 0.1):  # it ended two; so a quarter of 0.3 s is what it gets
            async with session.get(url) as response:
                await response.read()
            await asyncio.sleep(pause)
    server.close()
    assert len(set(used)) == len(used)
