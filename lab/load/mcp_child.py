"""Serves MCP on standard input and output, to be mounted, killed and leaked: ``python FILE [--log FILE] [--wild]``.

`forecast` answers at once, `hold` never. The log gets a line for each start (``start PID``) and call (``call ID``). A
wild server has a child, another one in a session of its own, and ignores SIGTERM and the end of its input. Uses the
standard library only, so that its own start is short.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

MODERN = "2026-07-28"
CHILD = ("sleep", "1000")
_SCHEMA = {"type": "object", "properties": {"id": {"type": "string"}, "place": {"type": "string"}}}
TOOLS = [
    {"name": "forecast", "description": "Tells the weather of a place.", "inputSchema": _SCHEMA},
    {"name": "hold", "description": "Is never done.", "inputSchema": _SCHEMA},
]
_INFO = {"name": "child", "version": "1"}
_CAPABILITIES: dict[str, Any] = {"tools": {}}


def _result(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the result of a request; None where it has none."""
    match method:
        case "server/discover":
            return {"supportedVersions": [MODERN], "capabilities": _CAPABILITIES, "serverInfo": _INFO}
        case "initialize":
            version = params.get("protocolVersion")
            return {"protocolVersion": version, "capabilities": _CAPABILITIES, "serverInfo": _INFO}
        case "tools/list":
            return {"tools": TOOLS, "ttlMs": 60_000, "cacheScope": "public"}
        case "tools/call" if params["name"] == "forecast":
            return {"content": [{"type": "text", "text": "clear"}], "structuredContent": {"celsius": 21.5}}
        case "ping":
            return {}
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", default=os.devnull)
    parser.add_argument("--wild", action="store_true")
    options = parser.parse_args()
    with open(options.log, "a", buffering=1) as log:
        if options.wild:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for alone in (False, True):
                subprocess.Popen(CHILD, start_new_session=alone, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        print("start", os.getpid(), file=log)
        for line in sys.stdin:
            message = json.loads(line)
            method, params = message.get("method", ""), message.get("params") or {}
            if method == "tools/call":
                print("call", params.get("arguments", {}).get("id", ""), file=log)
            result = _result(method, params)
            if "id" in message and result is not None:
                answer = {"jsonrpc": "2.0", "id": message["id"], "result": {"resultType": "complete", **result}}
                sys.stdout.write(json.dumps(answer) + "\n")
                sys.stdout.flush()
        while options.wild:
            time.sleep(1000)


if __name__ == "__main__":
    main()
