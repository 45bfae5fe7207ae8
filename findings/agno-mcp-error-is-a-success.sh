#!/bin/sh
# agno 3.1.10 (with fastmcp 4): a tool of an MCP server that fails is told to the model as one that succeeded.
#
# One would expect: a result with `isError` counts as a tool's failure, as an exception of a local function does: status
# "failure" and the text of the error, which hooks, retries and logs of failed tools go by.
# What happens: its status is "success", its error is None, and its text is how Python writes a list of content objects
# ("[TextContent(type='text', text=…"), so what the tool said stands in quotes, with escapes, among names of classes.
#
# Prints the versions, and the status, error and text of a local function and of a tool of a server that fail alike.
# Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check agno==3.1.10 fastmcp==4.2.3 mcp==2.3.0
cat > server.py <<'PY'
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")


@server.tool()
def order() -> str:
    """Orders bread."""
    raise ToolError("the shop is closed\ntry again at 9")


server.run()
PY
venv/bin/python - <<'PY' 2>/dev/null
import asyncio
import importlib.metadata
import logging
import sys

from agno.tools.function import Function, FunctionCall
from agno.tools.mcp import MCPTools


def order() -> str:
    """Orders bread."""
    raise RuntimeError("the shop is closed\ntry again at 9")


async def show(kind, function):
    call = FunctionCall(function=function, arguments={}, call_id="1")
    ended = await call.aexecute()
    text = getattr(ended.result, "content", ended.result)
    print(f"{kind}: status {ended.status}, error {ended.error!r}, text {text!r}")
    return ended.status, ended.error, text


async def main():
    logging.disable()
    for name in ("agno", "fastmcp", "mcp"):
        print(name, importlib.metadata.version(name))
    local = await show("a local function", Function.from_callable(order))
    async with MCPTools(command=f"{sys.executable} server.py") as tools:
        mounted = await show("a tool of a server", tools.functions["order"])
    as_found = (
        local[0] == "failure"
        and mounted[:2] == ("success", None)
        and "[TextContent(type='text', text='" in mounted[2]
        and "the shop is closed\\ntry again at 9" in mounted[2]
    )
    sys.exit(0 if as_found else 1)


asyncio.run(main())
PY
