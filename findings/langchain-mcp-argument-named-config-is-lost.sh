#!/bin/sh
# langchain-mcp-adapters 0.3.2 with langchain-core 1.8.3: arguments with some names never reach the server.
#
# One would expect: a tool of an MCP server gets the arguments that the model gave, whatever its author called them;
# `config` is a common name. What the adapter needs for itself goes another way, or it says which names it cannot take.
# What happens: `config`, `run_manager` and `runtime` are taken out on the way, without a word: the server sees a call
# without a required argument, refuses it, and the model gives it again, in vain. `self` raises a TypeError. The schema that
# the model sees still has all of them.
#
# Prints the versions, and for each name what the model is asked for and what the server gets. Exits with 1 when that
# changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check langchain-core==1.8.3 langchain-mcp-adapters==0.3.2 mcp==1.30.0
cat > server.py <<'PY'
import asyncio
import json

import mcp.types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

server = Server("settings")


@server.list_tools()
async def list_tools():
    names = ("config", "run_manager", "runtime", "self", "settings")
    return [types.Tool(name=f"set_{name}", inputSchema={"type": "object", "properties": {name: {"type": "string"}}})
            for name in names]


@server.call_tool()
async def call_tool(name, arguments):
    return [types.TextContent(type="text", text=json.dumps(arguments))]


async def main():
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())


asyncio.run(main())
PY
venv/bin/python - <<'PY'
import asyncio
import importlib.metadata
import sys

from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_mcp_adapters.client import MultiServerMCPClient


async def main():
    entry = {"command": sys.executable, "args": ["server.py"], "transport": "stdio"}
    shown = {}
    for tool in await MultiServerMCPClient({"settings": entry}).get_tools():
        (name,) = convert_to_openai_tool(tool)["function"]["parameters"]["properties"]
        try:
            answer = await tool.ainvoke({"type": "tool_call", "id": "1", "name": tool.name, "args": {name: "x"}})
            shown[name] = answer.content[0]["text"]
        except Exception as error:
            shown[name] = f"raises {type(error).__name__}"
        print(f"the model is asked for {name!r} and gives 'x'; the server gets {shown[name]}")
    return shown


for package in ("langchain-core", "langchain-mcp-adapters", "mcp"):
    print(package, importlib.metadata.version(package))
lost = dict.fromkeys(("config", "run_manager", "runtime"), "{}")
same = asyncio.run(main()) == {**lost, "self": "raises TypeError", "settings": '{"settings": "x"}'}
print("three names are lost, one raises" if same else "this has changed")
raise SystemExit(0 if same else 1)
PY
