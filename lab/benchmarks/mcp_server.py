"""A server of MCP that offers the workload's tool, with FastMCP as its documentation shows it.

``python -m lab.benchmarks.mcp_server http`` prints ``attached http=URL`` and serves streamable HTTP there, ``… stdio``
serves its standard input and output, ``… proxy URL`` serves HTTP and passes everything on to the server at the URL.
Runs in an environment of its own (`benchmarks.rooms`), so it imports nothing of toolbus.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from fastmcp import FastMCP  # type: ignore[import-not-found]  # in an environment of its own
from fastmcp.server import create_proxy  # type: ignore[import-not-found]

from lab.load import workload


def _app() -> FastMCP:
    if sys.argv[1] == "proxy":
        return create_proxy(sys.argv[2], name="bench-proxy")
    app: FastMCP = FastMCP("bench")
    app.tool(workload.forecast, name=workload.TOOL_NAME, description=workload.DESCRIPTION)
    return app


def main() -> None:
    """Serves until the process is ended."""
    app = _app()
    if sys.argv[1] == "stdio":
        app.run(transport="stdio", show_banner=False, log_level="ERROR")
        return
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"attached http=http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    asyncio.run(app.run_http_async(show_banner=False, sockets=[listener], log_level="error"))


if __name__ == "__main__":
    main()
