"""Runs the everything-server of the official SDK, over pipes or HTTP, in both eras or in the legacy one alone.

    python -m tests.parts.mcp.official.everything_server stdio|http [--legacy] [--port PORT]

The SDK's server speaks modern to whoever asks for it. With `--legacy` nobody gets that answer, so that a client of the
server goes on as with servers that know no other era.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]


def everything() -> Any:
    """Returns the module of the SDK's server, which only the source package of the SDK has."""
    return importlib.import_module("mcp_everything_server.server")


def over_pipes(legacy: bool) -> None:
    """Serves on the standard streams."""
    if not legacy:
        everything().mcp.run()
        return
    with subprocess.Popen([sys.executable, "-m", __spec__.name, "stdio"], stdin=subprocess.PIPE) as server:
        assert server.stdin is not None
        for line in sys.stdin.buffer:
            message = json.loads(line)
            if message.get("method") == "server/discover":
                error = {"code": -32601, "message": "Method not found"}
                sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}) + "\n")
                sys.stdout.flush()
            else:
                server.stdin.write(line)
                server.stdin.flush()
        server.stdin.close()


def over_http(legacy: bool, port: int) -> None:
    """Serves at /mcp."""
    import uvicorn

    server = everything()
    inner = server.mcp.streamable_http_app(event_store=server.event_store, retry_interval=100)

    async def app(
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        headers = dict(scope.get("headers", ()))
        if legacy and headers.get(b"mcp-protocol-version", b"").startswith(b"2026"):
            body = b"Bad Request: unsupported protocol version"
            await send({"type": "http.response.start", "status": 400, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": body})
            return
        await inner(scope, receive, send)

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="info")


def main() -> None:
    """Reads the command line and serves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("transport", choices=("stdio", "http"))
    parser.add_argument("--legacy", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.transport == "stdio":
        over_pipes(options.legacy)
    else:
        over_http(options.legacy, options.port)


if __name__ == "__main__":
    main()
