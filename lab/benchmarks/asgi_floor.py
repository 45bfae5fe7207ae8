"""Answers every POST at once, as a bare ASGI application on uvicorn does: ``python -m lab.benchmarks.asgi_floor``.

It reads its body as JSON and writes the answer of an invoke as JSON. What a server costs beyond this is its own work.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import orjson
import uvicorn
from starlette.types import Receive, Scope, Send

from lab.load import workload

ANSWER: dict[str, Any] = {
    "call_id": "http-0123456789abcdef",
    "output": json.loads(workload.OUTPUT_JSON),
    "is_error": False,
    "error": None,
    "content": [],
}


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers one request."""
    message = await receive()
    orjson.loads(message["body"])
    body = orjson.dumps(ANSWER)
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Serves until the process is ended."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"attached http=http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, loop="uvloop", http="httptools", lifespan="off", log_level="error", access_log=False)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
