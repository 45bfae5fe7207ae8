"""Serves and calls over MCP with the official SDK alone: ``python -m lab.benchmarks.mcp_sdk ROLE``.

Roles: ``http`` prints ``attached http=URL`` and serves the SDK's low-level server there, with answers of plain JSON,
``stdio`` serves standard input and output, ``host URL`` makes all calls with the SDK's `Client`. Runs in an environment
of its own (`benchmarks.rooms`), so it imports nothing of toolbus.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
import uvloop
from mcp import Client, types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from lab.load import windows, workload


async def _list_tools(context: Any, params: Any) -> types.ListToolsResult:
    schema = json.loads(workload.PARAMETERS_JSON)
    tool = types.Tool(name=workload.TOOL_NAME, description=workload.DESCRIPTION, input_schema=schema)
    return types.ListToolsResult(tools=[tool])


async def _call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    output = await workload.forecast(**(params.arguments or {}))
    text = types.TextContent(type="text", text=json.dumps(output))
    return types.CallToolResult(content=[text], structured_content=output)


def _server() -> Server[Any]:
    return Server("bench", on_list_tools=_list_tools, on_call_tool=_call_tool)


async def _serve_stdio() -> None:
    server = _server()
    async with stdio_server() as (reads, writes):
        await server.run(reads, writes, server.create_initialization_options())


def _serve_http() -> None:
    app = _server().streamable_http_app(json_response=True)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"attached http=http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    uvicorn.Server(uvicorn.Config(app, loop="uvloop", log_level="error", access_log=False)).run([listener])


async def _host(arguments: Sequence[str]) -> None:
    options = windows.options_of(__doc__).parse_args(arguments)
    url = options.address if "/mcp" in options.address else f"{options.address}/mcp"
    async with Client(url) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        name = next(each for each in names if each.endswith(workload.TOOL_NAME))

        async def ask(arguments: Any) -> None:
            result = await client.call_tool(name, arguments)
            if result.is_error:
                raise RuntimeError(f"a call failed: {result}")

        prepare = windows.preparing(lambda texts: [*map(json.loads, texts)], ask)
        await windows.run_cells(prepare, options, options.middle_pid)


if __name__ == "__main__":
    match sys.argv[1]:
        case "http":
            _serve_http()
        case "stdio":
            asyncio.run(_serve_stdio())
        case _:
            uvloop.run(_host(sys.argv[2:]))
