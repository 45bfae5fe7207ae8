import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.bus.gateway.calling import client, legacy_plugin
from tests.faults.raw_peer import RawPeer, tool
from toolbus.bus import Bus
from toolbus.sdk import Plugin, ToolScope
from toolbus.testing import running_bus


@dataclass
class Tools:
    """A bus whose tools ``local``, ``grpc`` and ``callback`` return their argument ``value``."""

    bus: Bus
    http: httpx.AsyncClient
    seen: list[Any] = field(default_factory=list)  # what the callback was posted
    scopes: list[ToolScope] = field(default_factory=list)  # of the calls of ``nap``
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)  # once ``nap`` sees its cancel


@asynccontextmanager
async def running_tools() -> AsyncIterator[Tools]:
    async with (
        running_bus(http="127.0.0.1:0", grace_seconds=0.0, roles=("Yui", "Ran")) as bus,
        client(bus) as http,
        legacy_plugin(lambda body: callback(body)) as url,
        Plugin("rest-test", address=bus.grpc_addresses[0]) as plugin,
    ):
        tools = Tools(bus, http)

        async def callback(body: dict[str, Any]) -> bytes:
            tools.seen.append(body)
            answer = {"output": body["arguments"].get("value"), "is_error": False}
            return json.dumps(answer).encode()

        @bus.tool
        def local(value: Any = None) -> Any:
            return value

        @plugin.tool
        def grpc(value: Any = None) -> Any:
            return value

        @plugin.tool
        async def nap(scope: ToolScope) -> None:
            tools.scopes.append(scope)
            scope.progress(message="asleep")
            try:
                await asyncio.Event().wait()
            finally:
                tools.cancelled.set()

        await plugin.ready()
        registered = await http.post("/api/tools/register", json={"name": "callback", "callback_url": url})
        assert registered.json()["ok"]
        yield tools


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Tools]:
    async with running_tools() as tools:
        yield tools


@pytest.fixture
def tools(shared: Tools) -> Tools:
    """The bus of all tests here, with nothing seen yet."""
    shared.seen.clear()
    shared.scopes.clear()
    shared.cancelled.clear()
    return shared


async def raw_peer(bus: Bus, answer: Any, *names: str) -> RawPeer:
    """Attaches a peer that answers by itself; the caller closes it."""
    peer = RawPeer(bus.grpc_addresses[0], answer=answer)
    peer.open()
    await peer.attach("raw", *(tool(name) for name in names))
    return peer
