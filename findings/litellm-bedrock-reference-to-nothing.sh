#!/bin/sh
# litellm 1.110.2: towards Bedrock, a schema that refers to itself is sent without what it refers to.
#
# One would expect: a tree (a node with a list of nodes), which pydantic and zod write with `$defs` and `$ref`, is sent as
# it is, as to OpenAI, or is cut at some depth; what is sent is a schema that can be read.
# What happens: the first level is written out and `$defs` is removed, but the reference within stays. `#/$defs/Node` then
# names nothing in the schema that the provider gets, and JSON Schema readers refuse to use it.
#
# Prints the version, and what is sent for a tree. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check litellm==1.110.2 boto3==1.44.8
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/env/bin/python" - <<'PY'
import http.server
import importlib.metadata
import json
import sys
import threading

import litellm

received = []


class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        usage = {"inputTokens": 1, "outputTokens": 1, "totalTokens": 2}
        message = {"role": "assistant", "content": [{"text": "done"}]}
        body = {"output": {"message": message}, "stopReason": "end_turn", "usage": usage, "metrics": {"latencyMs": 1}}
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
children = {"type": "array", "items": {"$ref": "#/$defs/Node"}}
node = {"type": "object", "properties": {"name": {"type": "string"}, "children": children}}
parameters = {"type": "object", "properties": {"root": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
litellm.completion(
    model="bedrock/converse/anthropic.claude-3-5-sonnet-20240620-v1:0",
    aws_access_key_id="k",
    aws_secret_access_key="s",
    aws_region_name="us-east-1",
    aws_bedrock_runtime_endpoint=f"http://127.0.0.1:{server.server_port}",
    messages=[{"role": "user", "content": "hello"}],
    tools=[{"type": "function", "function": {"name": "walk", "description": "Walks.", "parameters": parameters}}],
)
sent = received[0]["toolConfig"]["tools"][0]["toolSpec"]["inputSchema"]["json"]
print("litellm", importlib.metadata.version("litellm"))
print(json.dumps(sent))
dangling = '"#/$defs/Node"' in json.dumps(sent) and "$defs" not in sent
print("a reference to nothing" if dangling else "this has changed")
sys.exit(not dangling)
PY
