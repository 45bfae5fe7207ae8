"""The official client for Python at the endpoint: it sees every tool, also while tools come and go."""

from __future__ import annotations

import asyncio
import json

import pytest
from mcp import Client

from tests.parts.mcp.server.asking import Scripted
from toolbus.bus.catalog.entry import compile_tools
from toolbus.protocol.tool import Limits, Tool
from toolbus.testing import running_bus

ODD = {
    "$id": "https://x.example/same",
    "type": "object",
    "properties": {"n": {"type": "string", "pattern": r"^\-?\d+$"}},
}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_client_lists_thousands_of_tools_while_some_come_and_go(mode: str) -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        tools = compile_tools([Tool(f"t{number}", "Does something.") for number in range(2_500)], Limits())
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
