"""Keeps N calls in flight with the client that mounts are made of: ``python -m lab.load.mount_client URL``."""

from __future__ import annotations

import json

import uvloop

from lab.load import windows, workload
from toolbus.bus.mcp_client.connection import Connection
from toolbus.bus.mcp_client.handshake import open_connection
from toolbus.bus.mcp_client.http import HttpTransport


async def main() -> None:
    """Reads the command line and runs a window for each cell."""
    options = windows.options_of(__doc__).parse_args()
    url = options.address if "/mcp" in options.address else f"{options.address}/mcp"
    transport = HttpTransport("lab", url, {})
    connection = Connection(
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

    await windows.run_cells(
        windows.preparing(lambda texts: [*map(json.loads, texts)], ask), options, options.middle_pid
    )
    await connection.close()


if __name__ == "__main__":
    uvloop.run(main())
