"""The official client for Python at the endpoint: it sees every tool, also while tools come and go."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from mcp import Client
from mcp_types import ResourceUpdatedNotification, TextContent

from tests.parts.mcp.server.asking import Mounted, Scripted
from tests.support.waiting import until
from toolbus.bus import Bus, Config
from toolbus.bus.catalog.entry import compile_tool
from toolbus.parts.mcp.features import features_of
from toolbus.protocol.tool import Limits, Tool
from toolbus.sdk import Plugin
from toolbus.testing import running_bus

ODD = {
    "$id": "https://x.example/same",
    "type": "object",
    "properties": {"n": {"type": "string", "pattern": r"^\-?\d+$"}},
}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_client_lists_thousands_of_tools_while_some_come_and_go(mode: str) -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        tools = [compile_tool(Tool(f"t{number}", "Does something."), Limits()) for number in range(2_500)]
        bus.registry.register(Scripted("x", bus, lambda call: None), tools)
        staying = {f"t{number}" for number in range(2_500)}

        async def move() -> None:
            for number in range(1_000_000):

                @bus.tool(name=f"moving_{number % 3}")  # type: ignore[untyped-decorator]
                async def moving() -> None: ...

                await asyncio.sleep(0.1)
                bus.remove_tool(f"moving_{number % 3}")

        moves = asyncio.create_task(move())
        try:
            async with Client(f"http://{bus.http_address}/mcp", mode=mode, cache=None) as client:
                for _ in range(10):
                    listed = await client.list_tools()
                    assert staying <= {tool.name for tool in listed.tools}
                    assert listed.next_cursor is None
        finally:
            moves.cancel()


async def test_the_official_client_takes_results_of_tools_whose_schemas_are_odd() -> None:
    async with running_bus(http="127.0.0.1:0") as bus:

        @bus.tool(output_schema=ODD)  # type: ignore[untyped-decorator]
        async def odd() -> dict[str, str]:
            return {"n": "-5"}

        async with Client(f"http://{bus.http_address}/mcp") as client:
            await client.list_tools()
            result = await client.call_tool("odd", {})
            assert json.loads(json.dumps(result.structured_content)) == {"n": "-5"}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_client_outlives_a_bus_that_is_told_to_stop(tmp_path: Path, mode: str) -> None:
    """At the last moment a notification would make it list at a bus that takes no connection, and end by an error."""
    heard: list[str] = []

    async def hear(message: object) -> None:
        heard.append(type(message).__name__)

    async with contextlib.AsyncExitStack() as stack:
        bus = Bus(Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0", data_dir=tmp_path))
        await bus.start()
        again = Bus(Config(grpc=bus.grpc_addresses, http=bus.http_address or "", data_dir=tmp_path))
        plugin = Plugin("weather", address=bus.grpc_addresses[0])

        @plugin.tool
        def forecast() -> str:
            return "sunny"

        await stack.enter_async_context(plugin)
        client = await stack.enter_async_context(
            Client(f"http://{bus.http_address}/mcp", mode=mode, message_handler=hear, cache=None)
        )
        assert (await client.list_tools()).tools
        listening = await stack.enter_async_context(client.listen(tools_list_changed=True)) if mode == "auto" else None
        heard.clear()
        await bus.drain(1.0)  # as SIGTERM does
        await bus.stop()
        if listening is not None:  # it ends as a server ends it, not as a broken connection
            assert [event async for event in listening] == []
        assert heard == []
        await again.start()
        try:
            block = (await client.call_tool("forecast", {})).content[0]
            assert isinstance(block, TextContent)
            assert block.text == "sunny"
            await stack.aclose()
        finally:
            await again.stop()


async def test_the_official_client_stays_subscribed_over_a_restart_of_the_bus(tmp_path: Path) -> None:
    """It begins no new session by itself, not even after a 404: so the session has to go on with its subscriptions."""
    updated: list[str] = []

    async def hear(message: object) -> None:
        if isinstance(message, ResourceUpdatedNotification):
            updated.append(str(message.params.uri))

    bus = Bus(Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0", data_dir=tmp_path))
    await bus.start()
    again = Bus(Config(grpc=("127.0.0.1:0",), http=bus.http_address or "", data_dir=tmp_path))
    features_of(bus.core).add(Mounted("m", resources=["x://a"]))
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            Client(f"http://{bus.http_address}/mcp", mode="legacy", message_handler=hear, cache=None)
        )
        with pytest.warns(match="subscribe"):
            await client.subscribe_resource("x://a")
        await bus.stop()
        await again.start()
        stack.push_async_callback(again.stop)
        mounted = Mounted("m", resources=["x://a"])
        features_of(again.core).add(mounted)
        await until(lambda: updated, "the client to open its stream again, and to hear what it may have missed")
        mounted.listeners["x://a"][0]("x://a")
        await until(lambda: len(updated) == 2, "an update")
        assert updated == ["x://a", "x://a"]
        await stack.aclose()
