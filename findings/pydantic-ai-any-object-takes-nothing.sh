#!/bin/sh
# pydantic-ai-slim 2.68.0: towards OpenAI, an argument that takes any object is offered as one that takes nothing.
#
# One would expect: `{"type": "object"}` allows any properties (JSON Schema), and `allOf` of two objects allows the
# properties of both; a tool from a JSON Schema (Tool.from_schema, a server of MCP) is offered with what it takes.
# What happens: each object that does not say so gets `additionalProperties: false`, here also without strict mode. The
# first becomes an object without properties, and of the second each half forbids what the other one requires: no
# arguments are valid any more, and a server that constrains its model to the schema can only write `{}`.
#
# Prints the version, and for each argument whether its valid value is still allowed. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check \
  "pydantic-ai-slim[openai]==2.68.0" openai==3.57.0 jsonschema==4.25.1
"$folder/env/bin/python" - <<'PY'
import http.server
import importlib.metadata
import json
import sys
import threading

import jsonschema
from pydantic_ai import Agent, Tool
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

received = []


class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", "content": "done"}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "gpt-4o"}
        body["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
provider = OpenAIProvider(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k")


def offered(schema):
    tool = Tool.from_schema(lambda **arguments: "", "t", "A tool.", {"type": "object", "properties": {"v": schema}})
    received.clear()
    Agent(OpenAIChatModel("gpt-4o", provider=provider), tools=[tool]).run_sync("hello")
    return received[0]["tools"][0]["function"]


def half(name):
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}


print("pydantic-ai-slim", importlib.metadata.version("pydantic-ai-slim"))
failed = False
for case, schema, value, expected in (
    ("any object, in words", {"type": "object", "additionalProperties": True}, {"a": 1}, True),
    ("any object", {"type": "object"}, {"a": 1}, False),
    ("two objects", {"allOf": [half("a"), half("b")]}, {"a": 1, "b": 2}, False),
):
    function = offered(schema)
    allowed = jsonschema.Draft202012Validator(function["parameters"]).is_valid({"v": value})
    print(f"{case}: {json.dumps(function['parameters'])}")
    print(f"  strict: {function.get('strict', False)}; {json.dumps(value)} is {'allowed' if allowed else 'forbidden'}")
    failed |= allowed is not expected or function.get("strict", False)
sys.exit(failed)
PY
