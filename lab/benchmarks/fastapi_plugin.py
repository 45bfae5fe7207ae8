"""A plugin as the callback contract's own examples have it: a FastAPI application on uvicorn.

Prints ``attached http=URL``, the URL being its callback's. It is not registered: its callers know where it is.
"""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from lab.load import workload

application = FastAPI()


@application.post("/call")
async def call(request: dict[str, Any]) -> dict[str, Any]:
    """Answers a callback."""
    return {"output": await workload.forecast(**request["arguments"]), "is_error": False}


def main() -> None:
    """Serves on a free port of loopback until the process is ended."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"attached http=http://127.0.0.1:{listener.getsockname()[1]}/call", flush=True)
    server = uvicorn.Server(uvicorn.Config(application, log_level="error", access_log=False))
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
