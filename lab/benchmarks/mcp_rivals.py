"""Calls and serves over MCP with FastMCP and with the official SDK: ``python -m lab.benchmarks.mcp_rivals NAME ROLE``.

`fastmcp` is FastMCP as its documentation shows it; `sdk` is the SDK's low-level server, with answers of plain JSON, and
its `Client`. Roles: ``http`` prints ``attached http=URL`` and serves streamable HTTP there; ``host URL`` makes all
calls on the session of one client. FastMCP has three more: ``stdio`` serves standard input and output, ``proxy URL``
serves HTTP and passes everything on to the server at the URL, ``host stdio`` starts a server over pipes and calls that.
Runs in an environment of its own (`benchmarks.rooms`), so it imports nothing of toolbus.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import uvloop

from lab.load import windows, workload


def _listener() -> socket.socket:
    """Returns a socket on a free port of loopback, and prints the URL that is served there."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"attached http=http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    return listener


async def _host(client: Any, options: Any) -> None:
    async with client:
        listed = await client.list_tools()
        names = [tool.name for tool in getattr(listed, "tools", listed)]
        name = next(each for each in names if each.endswith(workload.TOOL_NAME))

        async def ask(arguments: Any) -> None:
            result = await client.call_tool(name, arguments)
            if result.is_error:
                raise RuntimeError(f"a call failed: {result}")

        await windows.run_cells(windows.preparing(windows.read_json, ask), options, options.middle_pid)


# -- FastMCP ---------------------------------------------------------------------------------------------------------


def fastmcp(role: str, *arguments: str) -> None:
    from fastmcp import Client, FastMCP  # type: ignore[import-not-found]  # in an environment of its own
    from fastmcp.client.transports import StdioTransport  # type: ignore[import-not-found]
    from fastmcp.server import create_proxy  # type: ignore[import-not-found]

    if role == "host":
        options = windows.options_of(__doc__).parse_args(arguments)
        own = StdioTransport(sys.executable, ["-m", "lab.benchmarks.mcp_rivals", "fastmcp", "stdio"])
        asyncio.run(_host(Client(own if options.address == "stdio" else options.address), options))
        return
    if role == "proxy":
        app = create_proxy(*arguments, name="bench-proxy")
    else:
        app = FastMCP("bench")
        app.tool(workload.forecast, name=workload.TOOL_NAME, description=workload.DESCRIPTION)
    if role == "stdio":
        app.run(transport="stdio", show_banner=False, log_level="ERROR")
    else:
        asyncio.run(app.run_http_async(show_banner=False, sockets=[_listener()], log_level="error"))


# -- the official SDK ------------------------------------------------------------------------------------------------


def sdk(role: str, *arguments: str) -> None:
    """Plays a role with the official SDK alone."""
    import uvicorn
    from mcp import Client

    if role == "host":
        options = windows.options_of(__doc__).parse_args(arguments)
        uvloop.run(_host(Client(windows.mcp_url(options.address)), options))
    else:
        app = _sdk_server().streamable_http_app(json_response=True)
        config = uvicorn.Config(app, loop="uvloop", log_level="error", access_log=False)
        uvicorn.Server(config).run([_listener()])


def _sdk_server() -> Any:
    from mcp import types
    from mcp.server.lowlevel import Server

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        schema = json.loads(workload.PARAMETERS_JSON)
        tool = types.Tool(name=workload.TOOL_NAME, description=workload.DESCRIPTION, input_schema=schema)
        return types.ListToolsResult(tools=[tool])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        output = await workload.forecast(**(params.arguments or {}))
        text = types.TextContent(type="text", text=json.dumps(output))
        return types.CallToolResult(content=[text], structured_content=output)

    return Server("bench", on_list_tools=list_tools, on_call_tool=call_tool)


if __name__ == "__main__":
    {"fastmcp": fastmcp, "sdk": sdk}[sys.argv[1]](*sys.argv[2:])
