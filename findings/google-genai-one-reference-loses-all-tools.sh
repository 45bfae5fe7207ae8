#!/bin/sh
# google-genai 3.6.1: a reference to `#/definitions/…` in one tool of an MCP session makes generate_content() raise.
#
# One would expect: `$ref` is a JSON pointer to any place of a schema, and `definitions` is where drafts up to 7, and many
# programs since, put what they refer to. A client that cannot convert one tool still offers the others.
# What happens: only `#/$defs/…` is followed. generate_content() raises a KeyError before it makes a request, so a model has
# no tool at all, of any plugin behind that server.
#
# Prints the version, and what reaches the model with either reference. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check google-genai==3.6.1 mcp==2.3.0
"$folder/env/bin/python" - <<'PY'
import asyncio
import http.server
import importlib.metadata
import json
import threading

import mcp
import mcp_types as types
from google import genai
from mcp.server.lowlevel import Server

received = []


class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps({"candidates": [{"content": {"role": "model", "parts": [{"text": "done"}]}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def tools(place):
    plain = {"type": "object", "properties": {"a": {"type": "string"}}}
    odd = {"type": "object", "properties": {"a": {"$ref": f"#/{place}/text"}}, place: {"text": {"type": "string"}}}
    return [types.Tool(name=name, input_schema=schema) for name, schema in (("plain", plain), ("odd", odd))]


async def offered(place, port):
    async def list_tools(*_):
        return types.ListToolsResult(tools=tools(place))

    received.clear()
    client = genai.Client(api_key="k", http_options={"base_url": f"http://127.0.0.1:{port}"})
    async with mcp.Client(Server("s", on_list_tools=list_tools)) as connected:
        try:
            config = {"tools": [connected.session]}
            await client.aio.models.generate_content(model="m", contents="hello", config=config)
        except Exception as error:
            return f"raises {type(error).__name__}"
    return ", ".join(each["name"] for tool in received[0]["tools"] for each in tool["functionDeclarations"])


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("google-genai", importlib.metadata.version("google-genai"))
shown = {place: asyncio.run(offered(place, server.server_address[1])) for place in ("$defs", "definitions")}
for place, what in shown.items():
    print(f"#/{place}/text", what)
same = shown["$defs"] == "plain, odd" and shown["definitions"].startswith("raises")
print("one reference loses all tools" if same else "this has changed")
raise SystemExit(0 if same else 1)
PY
