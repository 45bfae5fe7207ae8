#!/bin/sh
# ollama 0.6.3 (Python): a tool's schema loses objects within objects, choices, references and bounds on its way.
#
# One would expect: `chat(tools=[…])` with a tool as a dict sends its `parameters` as they are, or refuses what it cannot
# send. Items of an array, which may hold any schema, do arrive as they are.
# What happens: each property is read into a model of four fields (type, items, description, enum), and the rest is
# dropped without a word: an object arrives without its properties, an `anyOf` or `$ref` as `{}`.
#
# Prints the version, and each property as given and as the server gets it. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install --quiet --disable-pip-version-check ollama==0.6.3
cat > finding.py <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version

import ollama

print("ollama", version("ollama"))
TEXT = {"type": "string"}
GIVEN = {
    "object": {"type": "object", "properties": {"street": TEXT}, "required": ["street"]},
    "choice": {"anyOf": [TEXT, {"type": "integer"}]},
    "reference": {"$ref": "#/$defs/Text"},
    "bounds": {"type": "integer", "minimum": 1, "maximum": 5},
    "items": {"type": "array", "items": {"anyOf": [TEXT, {"type": "object", "properties": {"street": TEXT}}]}},
}
EXPECTED = {**GIVEN, "object": {"type": "object"}, "choice": {}, "reference": {}, "bounds": {"type": "integer"}}
received = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = {"model": "m", "message": {"role": "assistant", "content": "hi"}, "done": True}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
parameters = {"type": "object", "properties": GIVEN, "$defs": {"Text": TEXT}}
function = {"name": "move", "description": "Moves.", "parameters": parameters}
client = ollama.Client(host=f"http://127.0.0.1:{server.server_port}")
client.chat(model="m", messages=[{"role": "user", "content": "hi"}], tools=[{"type": "function", "function": function}])
got = received[0]["tools"][0]["function"]["parameters"]["properties"]
for name, schema in GIVEN.items():
    print(f"{name}: {json.dumps(schema)} arrives as {json.dumps(got[name])}")
print("this has changed" if got != EXPECTED else "four of five schemas have lost what they say")
raise SystemExit(got != EXPECTED)
PY
environment/bin/python finding.py
