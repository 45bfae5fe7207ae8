#!/bin/sh
# mistralai 3.7.0 (Python): of the tools of an MCP server only the first page reaches the model.
#
# One would expect: `get_tools` returns all tools of a server, and asks for the next page while `nextCursor` names one, as
# MCP says.
# What happens: it asks once, and drops the cursor: no error, no log, and the tools of other pages cannot be called.
#
# Prints the version, what the server has, and what the model gets. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install --quiet --disable-pip-version-check mistralai==3.7.0 mcp==2.3.0
cat > server.py <<'PY'
import json
import sys

PAGES = {None: ("one", "second"), "second": ("two", None)}

for line in sys.stdin:
    request = json.loads(line)
    method, params = request.get("method"), request.get("params") or {}
    if "id" not in request:
        continue
    result = {}
    if method == "initialize":
        info = {"name": "s", "version": "1"}
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    elif method == "tools/list":
        name, following = PAGES[params.get("cursor")]
        result = {"tools": [{"name": name, "inputSchema": {"type": "object"}}]}
        result |= {"nextCursor": following} if following else {}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
PY
cat > finding.py <<'PY'
import asyncio
import sys
from importlib.metadata import version

from mcp import StdioServerParameters
from mistralai.extra.mcp.stdio import MCPClientSTDIO

print("mistralai", version("mistralai"))


async def listed():
    client = MCPClientSTDIO(StdioServerParameters(command=sys.executable, args=["server.py"]))
    await client.initialize()
    names = [tool.function.name for tool in await client.get_tools()]
    await client.aclose()
    return names


names = asyncio.run(listed())
print("the server has:  ['one', 'two'], on two pages")
print("the model gets: ", names)
print("the second page is lost" if names == ["one"] else "this has changed")
raise SystemExit(names != ["one"])
PY
environment/bin/python finding.py
