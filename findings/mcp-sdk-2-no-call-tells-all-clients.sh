#!/bin/sh
# mcp 2.3.0 (Python): no call of a server tells both clients of either era that its tools have changed.
#
# One would expect: a tool that adds a tool calls `ctx.notify_tools_changed()`, or `ctx.session.send_tool_list_changed()`
# as in release 1, and each client that wants to hear of changes does: the same server serves both eras by itself, and its
# author does not know who is connected.
# What happens: the first reaches only clients of 2026-07-28 that listen, the second only clients up to 2025-11-25. The
# other one gets nothing and shows its old tools; there is no error, and no warning.
#
# Prints the version, and which client hears of which call. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check mcp==2.3.0
"$folder/env/bin/python" - <<'PY'
import asyncio
import importlib.metadata
import sys

import mcp
from mcp.server.mcpserver import Context, MCPServer


def server(call):
    made = MCPServer("s")

    @made.tool()
    async def grow(ctx: Context) -> str:
        """Adds a tool."""
        made.add_tool(lambda: "x", name="extra")
        await (ctx.notify_tools_changed() if call == "notify" else ctx.session.send_tool_list_changed())
        return "grown"

    return made


async def hears(call, mode):
    heard = asyncio.Event()

    async def on_message(message):
        if "ToolListChanged" in type(message).__name__:
            heard.set()

    async def listen(client):
        async with client.listen(tools_list_changed=True) as changes:
            listening.set()
            async for _ in changes:
                heard.set()

    listening = asyncio.Event()
    async with mcp.Client(server(call), mode=mode, message_handler=on_message) as client:
        listener = None
        if mode == "auto":
            listener = asyncio.create_task(listen(client))
            await asyncio.wait_for(listening.wait(), 30)
        await client.call_tool("grow", {})
        try:
            await asyncio.wait_for(heard.wait(), 3)
        except TimeoutError:
            pass
        if listener is not None:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
        return client.protocol_version, heard.is_set()


async def main():
    print("mcp", importlib.metadata.version("mcp"))
    failed = False
    for call, mode, expected in (
        ("notify", "auto", True),
        ("notify", "legacy", False),
        ("session", "auto", False),
        ("session", "legacy", True),
    ):
        version, heard = await hears(call, mode)
        name = "ctx.notify_tools_changed()" if call == "notify" else "ctx.session.send_tool_list_changed()"
        print(f"{name}: a client of {version} hears {'it' if heard else 'nothing'}")
        failed |= heard is not expected
    return failed


sys.exit(asyncio.run(main()))
PY
