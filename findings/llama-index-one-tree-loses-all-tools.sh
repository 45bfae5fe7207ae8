#!/bin/sh
# llama-index-tools-mcp 0.6.0: one tool whose argument is a tree makes the list of all tools raise.
#
# One would expect: a schema that refers to itself (a node with a list of nodes) is valid, and both pydantic and zod write
# such schemas. A client that cannot make a model of one tool still lists the others.
# What happens: to_tool_list_async() follows the reference without end and raises a RecursionError, so a program has no
# tool at all, of any plugin behind that server.
#
# Prints the version, and what is listed with and without that tool. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check \
  llama-index-tools-mcp==0.6.0 llama-index-core==0.14.25 mcp==2.1.1
cat > "$folder/server.py" <<'PY'
import asyncio
import sys

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

children = {"type": "array", "items": {"$ref": "#/$defs/Node"}}
node = {"type": "object", "properties": {"name": {"type": "string"}, "children": children}}
tree = {"type": "object", "properties": {"root": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
plain = {"type": "object", "properties": {"a": {"type": "string"}}}
schemas = {"plain": plain, "tree": tree} if "tree" in sys.argv else {"plain": plain}


async def list_tools(*_):
    return types.ListToolsResult(tools=[types.Tool(name=name, input_schema=each) for name, each in schemas.items()])


async def main():
    server = Server("s", on_list_tools=list_tools)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


asyncio.run(main())
PY
"$folder/env/bin/python" - "$folder/server.py" <<'PY'
import asyncio
import importlib.metadata
import os
import sys

from llama_index.tools.mcp import BasicMCPClient, McpToolSpec


async def listed(*words):
    client = BasicMCPClient(sys.executable, args=[sys.argv[1], *words])
    try:
        return [tool.metadata.name for tool in await McpToolSpec(client=client).to_tool_list_async()]
    except RecursionError as error:
        return type(error).__name__


print("llama-index-tools-mcp", importlib.metadata.version("llama-index-tools-mcp"))
plain, tree = asyncio.run(listed()), asyncio.run(listed("tree"))
print("without the tree:", plain)
print("with the tree:   ", tree)
sys.stdout.flush()
os._exit((plain, tree) != (["plain"], "RecursionError"))  # what the error left open would wait
PY
