"""Answers POST at once, as ASGI applications on uvicorn do: ``python -m lab.benchmarks.asgi_servers NAME``.

`floor` is a bare application that reads its body as JSON and writes the answer of an invoke as JSON: what a server
costs beyond this is its own work. `fastapi` is a plugin as the callback contract's own examples have it; it is not
registered, since its callers know where it is. `collector` takes spans and stores none. Each prints its address as
``attached http=URL``.
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


async def collector(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@application.post("/call")
async def call(request: dict[str, Any]) -> dict[str, Any]:
    return {"output": await workload.forecast(**request["arguments"]), "is_error": False}


def main() -> None:
    """Serves on a free port of loopback until the process is ended."""
    app: Any = {"floor": floor, "collector": collector, "fastapi": application}[sys.argv[1]]
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}{'/call' if app is application else ''}"
    print(f"attached http={url}", flush=True)
    fast: dict[str, Any] = {"loop": "uvloop", "http": "httptools", "lifespan": "off"} if app is not application else {}
    config = uvicorn.Config(app, log_level="error", access_log=False, **fast)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
