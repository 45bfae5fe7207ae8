#!/bin/sh
# mcp 2.3.0 (Python): after a tool changed, the client refuses its right results by the output schema of before.
#
# One would expect: a server that changes a tool says so by notifications/tools/list_changed, so a client that has received
# it drops the schema that it keeps of that tool: it reads the new one, or does not validate until it has.
# What happens: the schema of the last list_tools() stays in force. Each call of the tool runs at the server, and its
# result is then refused with a RuntimeError, until the program lists the tools again. A program that lists once, at its
# start, has lost the tool from the day on which its author gave the result another field.
#
# Prints the version, and what calls give before the change, after it, and after the tools are listed again. Exits with 1
# when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mcp==2.3.0
"$folder/venv/bin/python" - <<'PY'
import asyncio
import importlib.metadata

import mcp
import mcp_types as types
from mcp.server.lowlevel import Server

unit = ["celsius"]


async def list_tools(*_):
    result = {"type": "object", "properties": {unit[0]: {"type": "number"}}, "required": [unit[0]]}
    return types.ListToolsResult(
        tools=[
            types.Tool(name="weather", input_schema={"type": "object"}, output_schema=result),
            types.Tool(name="change", input_schema={"type": "object"}),
        ]
    )


async def call_tool(context, params):
    if params.name == "change":
        unit[0] = "kelvin"
        await context.session.send_tool_list_changed()
        return types.CallToolResult(content=[])
    return types.CallToolResult(content=[], structured_content={unit[0]: 1})


async def main():
    told, shown = asyncio.Event(), []

    async def hear(message):
        if isinstance(message, types.ToolListChangedNotification):
            told.set()

    async def weather(when):
        try:
            shown.append(str((await client.call_tool("weather", {})).structured_content))
        except Exception as error:
            shown.append(f"raises {type(error).__name__}")
        print(f"{when}: {shown[-1]}")

    async with mcp.Client(
        Server("s", on_list_tools=list_tools, on_call_tool=call_tool), mode="legacy", message_handler=hear
    ) as client:
        await client.list_tools()
        await weather("before the change")
        await client.call_tool("change", {})
        await asyncio.wait_for(told.wait(), 10)
        await weather("after notifications/tools/list_changed has arrived")
        await client.list_tools()
        await weather("after the tools are listed again")
    return shown


print("mcp", importlib.metadata.version("mcp"))
same = asyncio.run(main()) == ["{'celsius': 1}", "raises RuntimeError", "{'kelvin': 1}"]
print("right results are refused until the tools are listed again" if same else "this has changed")
raise SystemExit(0 if same else 1)
PY
