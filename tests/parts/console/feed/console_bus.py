"""Opens buses with a console, and follows their digests over HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.support.waiting import WAIT_SECONDS, within
from toolbus.bus import Bus, Config
from toolbus.protocol.limits import Timings

TIMINGS = Timings(digest_seconds=0.02, digest_idle_seconds=0.2)
STREAM = "/api/console/stream"


@contextlib.asynccontextmanager
async def console_bus(**settings: Any) -> AsyncIterator[tuple[Bus, httpx.AsyncClient]]:
    """Runs a bus, and a client of its HTTP."""
    config = Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0", **settings)
    async with Bus(config, timings=TIMINGS) as bus:

        @bus.tool
        def add(a: int, b: int) -> int:
            return a + b

        async with httpx.AsyncClient(
            base_url=f"http://{bus.http_address}", verify=False, timeout=WAIT_SECONDS
        ) as client:
            yield bus, client


class Follower:
    """Reads the events of a stream of digests."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()
        self.retry = 0  # milliseconds, as the stream said last

    async def event(self) -> tuple[str, dict[str, Any]]:
        """Returns the next event; ("", {}) where the stream has ended."""
        name, data = "", {}
        async for line in self._lines:
            field, _, value = line.partition(": ")
            if field == "retry":
                self.retry = int(value)
            elif field == "event":
                name = value
            elif field == "data":
                data = json.loads(value)
            elif not line and name:
                return name, data
        return "", {}

    async def to_the_end(self) -> list[str]:
        """Reads until the stream ends. Returns the names of the events."""
        names: list[str] = []
        while name := (await self.event())[0]:
            names.append(name)
        return names

    async def digest(self) -> dict[str, Any]:
        """Returns the next digest."""
        name, data = await within(self.event())
        assert name == "digest"
        return data


@contextlib.asynccontextmanager
async def following(client: httpx.AsyncClient, **headers: str) -> AsyncIterator[Follower]:
    """Follows the digests."""
    async with client.stream("GET", STREAM, headers=headers, timeout=60) as response:
        yield Follower(response)
