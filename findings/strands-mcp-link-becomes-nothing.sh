#!/bin/sh
# strands-agents 1.62.0: what a tool of an MCP server returns as a link or as sound reaches the model as nothing at all.
#
# One would expect: a kind of content that a client cannot show to a model is told in words (the link's address and name,
# the sound's type), as text, pictures and embedded resources of the same result are passed on.
# What happens: blocks of the kinds `resource_link` and `audio` are left out. A tool that returns nothing else succeeds
# with an empty content, so the model cannot know that there is a file, and has nothing to pass on to the next tool.
#
# Prints the versions, what the server sends, and what the client passes on. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check strands-agents==1.62.0 mcp==2.1.1
cat > server.py <<'PY'
import base64

import mcp_types as types
from mcp.server.mcpserver import MCPServer

server = MCPServer("files")
SOUND = base64.b64encode(b"RIFF\x24\x00\x00\x00WAVEfmt ").decode()


@server.tool()
def link() -> list[types.ContentBlock]:
    """Finds a file."""
    return [types.ResourceLink(type="resource_link", uri="file:///notes.txt", name="notes")]


@server.tool()
def sound() -> list[types.ContentBlock]:
    """Records a sound."""
    return [types.AudioContent(type="audio", data=SOUND, mime_type="audio/wav")]


@server.tool()
def embedded() -> list[types.ContentBlock]:
    """Reads a file."""
    inside = types.TextResourceContents(uri="file:///notes.txt", text="bread", mime_type="text/plain")
    return [types.EmbeddedResource(type="resource", resource=inside)]


server.run()
PY
venv/bin/python - <<'PY' 2>/dev/null
import asyncio
import importlib.metadata
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from strands.tools.mcp import MCPClient

PROGRAM = StdioServerParameters(command=sys.executable, args=["server.py"])
NAMES = ("link", "sound", "embedded")


async def of_sdk():
    async with stdio_client(PROGRAM) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        return {name: [block.type for block in (await session.call_tool(name, {})).content] for name in NAMES}


for name in ("strands-agents", "mcp"):
    print(name, importlib.metadata.version(name))
sent, passed_on = asyncio.run(of_sdk()), {}
with MCPClient(lambda: stdio_client(PROGRAM)) as client:
    for name in NAMES:
        result = client.call_tool_sync("1", name, {})
        passed_on[name] = result["status"], result["content"]
        print(f"{name}: the server sends {sent[name]}, the client passes on {passed_on[name]}")
as_found = sent == {"link": ["resource_link"], "sound": ["audio"], "embedded": ["resource"]} and passed_on == {
    "link": ("success", []),
    "sound": ("success", []),
    "embedded": ("success", [{"text": "bread"}]),
}
sys.exit(0 if as_found else 1)
PY
