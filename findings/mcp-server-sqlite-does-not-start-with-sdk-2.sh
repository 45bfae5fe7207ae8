#!/bin/sh
# mcp-server-sqlite 2025.4.25: a fresh install takes release 2 of the MCP SDK, and the server cannot start.
#
# One would expect: a server that is installed today starts, and its package excludes releases of the SDK that it cannot
# run with.
# What happens: it requires `mcp>=1.6.0` without an upper bound, so pip installs 2.3.0, whose Server has no decorators any
# more. The program ends with an AttributeError before it reads a message, which a client sees as a connection that closes.
# With `mcp<2` beside it, the same package answers.
#
# Prints the versions, and what the program answers with either SDK. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for sdk in 2.3.0 1.27.0; do
    python3 -m venv "$folder/$sdk"
    "$folder/$sdk/bin/pip" install --quiet --disable-pip-version-check mcp-server-sqlite==2025.4.25 "mcp==$sdk"
done
python3 - "$folder" <<'PY'
import json
import subprocess
import sys

folder, failed = sys.argv[1], False
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "finding", "version": "1"}},
}


def answer(sdk):
    command = [f"{folder}/{sdk}/bin/mcp-server-sqlite", "--db-path", f"{folder}/{sdk}.db"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as server:
        try:
            server.stdin.write(json.dumps(HELLO) + "\n")
            server.stdin.flush()
        except BrokenPipeError:
            pass
        line = server.stdout.readline()
        if line:
            server.terminate()
            return "answers as " + json.loads(line)["result"]["serverInfo"]["name"]
        return server.stderr.read().strip().splitlines()[-1]


for sdk, expected in (
    ("2.3.0", "AttributeError: 'Server' object has no attribute 'list_resources'"),
    ("1.27.0", "answers as sqlite"),
):
    seen = answer(sdk)
    print(f"mcp-server-sqlite 2025.4.25 with mcp {sdk}: {seen}")
    failed |= seen != expected
sys.exit(failed)
PY
