"""Calls and serves over MCP with FastMCP, as its documentation shows it: ``python -m lab.benchmarks.mcp_rival ROLE``.

Roles: ``http`` prints ``attached http=URL`` and serves streamable HTTP there, ``stdio`` serves its standard input and
output, ``proxy URL`` serves HTTP and passes everything on to the server at the URL, ``host URL`` makes all calls on the
session of one client (``host stdio`` starts a server and calls that). Runs in an environment of its own
(`benchmarks.rooms`), so it imports nothing of toolbus.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Sequence

from fastmcp import Client, FastMCP  # type: ignore[import-not-found]  # in an environment of its own
from fastmcp.client.transports import StdioTransport  # type: ignore[import-not-found]
from fastmcp.server import create_proxy  # type: ignore[import-not-found]

from lab.load import windows, workload


async def host(arguments: Sequence[str]) -> None:
    """Reads the command line and runs a window for each cell."""
    options = windows.options_of(__doc__).parse_args(arguments)
    server = options.address
    if server == "stdio":
        server = StdioTransport(sys.executable, ["-m", "lab.benchmarks.mcp_rival", "stdio"])
    async with Client(server) as client:

        async def ask(arguments: object) -> None:
            result = await client.call_tool(workload.TOOL_NAME, arguments)
            if result.is_error:
                raise RuntimeError(f"a call failed: {result}")

        await windows.run_cells(
            windows.preparing(lambda texts: [*map(json.loads, texts)], ask), options, options.middle_pid
        )


def serve(role: str, url: str = "") -> None:
    """Serves until the process is ended."""
    if role == "proxy":
        app = create_proxy(url, name="bench-proxy")
    else:
        app = FastMCP("bench")
        app.tool(workload.forecast, name=workload.TOOL_NAME, description=workload.DESCRIPTION)
    if role == "stdio":
        app.run(transport="stdio", show_banner=False, log_level="ERROR")
        return
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"attached http=http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    asyncio.run(app.run_http_async(show_banner=False, sockets=[listener], log_level="error"))


if __name__ == "__main__":
    if sys.argv[1] == "host":
        asyncio.run(host(sys.argv[2:]))
    else:
        serve(*sys.argv[1:])
