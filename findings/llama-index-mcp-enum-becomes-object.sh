#!/bin/sh
# llama-index-tools-mcp 0.6.0: an argument with the type of a Python Enum, of any MCP server, becomes an object.
#
# One would expect: the official SDK, as pydantic, writes an Enum once under `$defs` and refers to it: `{"$ref":
# "#/$defs/Unit"}`, a text that is one of two. A client shows the model that text.
# What happens: what is referred to is taken for a class with fields, and gets one field, named as the Enum. The model is
# asked for {"Unit": "kelvin"}, gives that, and the server refuses it, as "kelvin" is what it has asked for.
#
# Prints the versions, what the server asks for, what the model is asked for, and what a call with either gives. Exits
# with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check llama-index-tools-mcp==0.6.0 llama-index-core==0.14.25 mcp==2.3.0
cat > server.py <<'PY'
import enum

from mcp.server.mcpserver import MCPServer


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


server = MCPServer("weather")


@server.tool()
def weather(unit: Unit) -> str:
    """Says how warm it is."""
    return f"1 {unit.value}"


server.run()
PY
venv/bin/python - <<'PY' 2>/dev/null
import asyncio
import importlib.metadata
import sys

from llama_index.tools.mcp import BasicMCPClient, McpToolSpec


async def main():
    client = BasicMCPClient(sys.executable, args=["server.py"])
    (declared,) = (await client.list_tools()).tools
    (tool,) = await McpToolSpec(client=client).to_tool_list_async()
    asked = tool.metadata.to_openai_tool()["function"]["parameters"]
    text = {key: declared.input_schema["$defs"]["Unit"][key] for key in ("type", "enum")}
    shown = asked["$defs"]["Unit"]
    print("the server asks for", text)
    print("the model is asked for", {key: shown[key] for key in ("type", "properties")})
    refused = []
    for unit in ({"Unit": "kelvin"}, "kelvin"):
        answer = (await tool.acall(unit=unit)).raw_output
        refused.append(answer.is_error)
        print(f"unit={unit!r}:", "refused" if answer.is_error else answer.content[0].text)
    return text == {"type": "string", "enum": ["celsius", "kelvin"]} and shown["type"] == "object", refused


for package in ("llama-index-tools-mcp", "llama-index-core", "mcp"):
    print(package, importlib.metadata.version(package))
same = asyncio.run(main()) == (True, [True, False])
print("a text becomes an object" if same else "this has changed")
raise SystemExit(0 if same else 1)
PY
