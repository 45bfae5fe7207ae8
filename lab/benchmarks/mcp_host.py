"""The host process of a run over MCP, with the client of FastMCP: one client, all calls at once on its session.

``python -m lab.benchmarks.mcp_host URL`` asks the server there, ``… stdio`` starts one and asks that. Runs in an
environment of its own (`benchmarks.rooms`), so it imports nothing of toolbus.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from fastmcp import Client  # type: ignore[import-not-found]  # in an environment of its own
from fastmcp.client.transports import StdioTransport  # type: ignore[import-not-found]

from lab.load import windows, workload


async def main() -> None:
    """Reads the command line and runs a window for each cell."""
    options = windows.options_of(__doc__).parse_args()
    server = options.address
    if server == "stdio":
        server = StdioTransport(sys.executable, ["-m", "lab.benchmarks.mcp_server", "stdio"])
    async with Client(server) as client:

        def prepare(texts: Sequence[str]) -> windows.Ask:
            arguments = [json.loads(text) for text in texts]

            async def ask(slot: int) -> None:
                result = await client.call_tool(workload.TOOL_NAME, arguments[slot])
                if result.is_error:
                    raise RuntimeError(f"a call failed: {result}")

            return ask

        await windows.run_cells(prepare, options, options.middle_pid)


if __name__ == "__main__":
    asyncio.run(main())
