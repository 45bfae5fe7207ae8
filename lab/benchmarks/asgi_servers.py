"""Answers POST at once, as ASGI applications on uvicorn do: ``python -m lab.benchmarks.asgi_servers floor|fastapi``.

`floor` is a bare application that reads its body as JSON and writes the answer of an invoke as JSON: what a server
costs beyond this is its own work. `fastapi` is a plugin as the callback contract's own examples have it; it is not
registered, since its callers know where it is. Both print ``attached http=URL``.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from lab.load import workload

ANSWER: dict[str, Any] = {
    "call_id": "http-0123456789abcdef",
    "output": json.loads(workload.OUTPUT_JSON),
    "is_error": False,
    "error": None,
    "content": [],
}
application = FastAPI()


async def floor(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    orjson.loads(message["body"])
    body = orjson.dumps(ANSWER)
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@application.post("/call")
async def call(request: dict[str, Any]) -> dict[str, Any]:
    return {"output": await workload.forecast(**request["arguments"]), "is_error": False}


def main() -> None:
    """Serves on a free port of loopback until the process is ended."""
    is_floor = sys.argv[1] == "floor"
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}{'' if is_floor else '/call'}"
    print(f"attached http={url}", flush=True)
    fast: dict[str, Any] = {"loop": "uvloop", "http": "httptools", "lifespan": "off"} if is_floor else {}
    config = uvicorn.Config(floor if is_floor else application, log_level="error", access_log=False, **fast)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
