"""Connections towards programs of this machine: kept for the next request, and no more of them than are needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest
from aiohttp import web

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import outbound


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
        used.clear()
        for _ in range(20):
            await ask()
        assert [*used.values()] == [20]
        async with asyncio.timeout(WAIT_SECONDS):
            while len(runner.server.connections if runner.server else ()) > 1:  # the others are closed, being idle
                await ask()
        assert len(used) == 1
    await runner.cleanup()


@pytest.mark.parametrize("server_seconds", [2.0, 5.0], ids=["gunicorn", "node and uvicorn"])
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
        for pause in (server_seconds + 0.1, 0.0):
            async with session.post(url) as response:
                assert await response.text() == "ok"
            await asyncio.sleep(pause)
    server.close()
    assert lost == 0
