"""The listening side of the gateway, on the loop that `toolbus serve` has."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import uvloop

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.gateway.http_server import HttpServer

CROWD = 64


async def _silent(scope: Any, receive: Any, send: Any) -> None:
    """Never asked: nobody sends a request."""


async def _passes_until_taken(crowd: int) -> int:
    server = HttpServer(connections=2 * crowd, head_seconds=WAIT_SECONDS, neighbours=Neighbours())
    server.bind("127.0.0.1:0")
    await server.start(_silent, {})
    host, _, port = server.address.partition(":")
    with contextlib.ExitStack() as open_ones:
        for _ in range(crowd):
            open_ones.enter_context(socket.create_connection((host, int(port))))
        assert server._server is not None
        taken, passes = server._server.server_state.connections, 0
        while len(taken) < crowd and passes < 10 * crowd:
            await asyncio.sleep(0)
            passes += 1
        assert len(taken) == crowd
    await server.stop()
    return passes


def test_a_burst_of_new_connections_is_accepted_in_few_passes_of_the_loop() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        passes = runner.run(_passes_until_taken(CROWD))
    assert passes <= CROWD / 4, "one at a time, each waits for a pass of a busy loop"
