#!/bin/sh
# langchain-google-genai 4.4.3: one choice of numbers loses all tools, and fields of an object become required.
#
# One would expect: `{"type": "integer", "enum": [1, 2, 3]}` is valid JSON Schema; a declaration that cannot have such an
# enum is sent without it, and the other tools are offered. Fields that a schema does not list in `required` may be left
# out, within an object as at the top.
# What happens: a model with that tool among others raises a ValidationError before it sends a request. And of an argument
# that is an object, every field is sent as required, whatever the schema says; at the top, and in lists, they are not.
#
# Prints the version, and what is sent for each argument. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check \
  langchain-google-genai==4.4.3 langchain-core==1.8.3 google-genai==3.6.1
"$folder/env/bin/python" - <<'PY'
import http.server
import importlib.metadata
import json
import sys
import threading

from langchain_core.tools import StructuredTool
from langchain_google_genai import ChatGoogleGenerativeAI

received = []


class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        candidate = {"content": {"role": "model", "parts": [{"text": "done"}]}, "finishReason": "STOP"}
        usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
        text = json.dumps({"candidates": [candidate], "usageMetadata": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
model = ChatGoogleGenerativeAI(model="gemini-2.5-pro", google_api_key="k", base_url=url)


def tool(name, argument):
    schema = {"type": "object", "properties": {"v": argument}}
    return StructuredTool(name=name, description="A tool.", args_schema=schema, func=lambda **arguments: "")


def sent(argument):
    received.clear()
    try:
        model.bind_tools([tool("plain", {"type": "string"}), tool("other", argument)]).invoke("hello")
    except Exception as error:
        return f"raises {type(error).__name__}, {len(received)} requests"
    declarations = [each for part in received[0]["tools"] for each in part["functionDeclarations"]]
    return declarations[1]["parameters"]["properties"]["v"]


print("langchain-google-genai", importlib.metadata.version("langchain-google-genai"))
fields = {"name": {"type": "string"}, "age": {"type": "integer"}}
person = {"type": "object", "properties": fields, "required": ["name"]}
failed = False
for argument, expected in (
    ({"type": "integer", "enum": [1, 2, 3]}, "raises ValidationError, 0 requests"),
    (person, ["name", "age"]),
    ({"type": "array", "items": person}, ["name"]),
):
    seen = sent(argument)
    print(f"{json.dumps(argument)}: {json.dumps(seen)}")
    required = seen if isinstance(seen, str) else seen.get("items", seen)["required"]
    failed |= required != expected
sys.exit(failed)
PY
