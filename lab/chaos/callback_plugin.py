"""A plugin that knows HTTP only: ``python -m lab.chaos.callback_plugin MAIN_SERVER FOLDER PART PORT PUBLIC_PORT``.

It answers at PORT and is registered with PUBLIC_PORT, which may be that of a line. Once it is registered, a file says
so; started again after it was killed it registers nothing, since the bus has to know it still.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from lab.chaos.work import Runs

RETRY_SECONDS = 0.3
REQUEST_SECONDS = 3.0


class Callback(BaseHTTPRequestHandler):
    """Answers calls, each connection on a thread of its own."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one piece a response
    runs: Runs  # set before the first request

    def do_POST(self) -> None:
        """Runs the tool."""
        arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["arguments"]
        self.runs.begin(arguments["token"])
        time.sleep(arguments.get("seconds", 0.0))
        answer: dict[str, Any] = {"output": self.runs.end(arguments["token"]), "is_error": False}
        if arguments.get("refuse"):
            answer = {"output": None, "is_error": True, "error": "as you asked"}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing of calls."""


class Server(ThreadingHTTPServer):
    """A server whose callers may go away in the middle of a call."""

    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of connections that broke; of other faults, what they are."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def register(main_server: str, tool: dict[str, Any], registered: Path) -> None:
    """Registers the tool; tries until the bus takes it, and leaves a file that says so."""
    with httpx.Client(trust_env=False, timeout=REQUEST_SECONDS) as client:
        while True:
            try:
                if client.post(f"{main_server}/api/tools/register", json=tool).is_success:
                    registered.touch()
                    return
            except httpx.TransportError:
                pass  # it is away
            time.sleep(RETRY_SECONDS)


def main(main_server: str, folder: str, name: str, port: str, public_port: str) -> None:
    """Serves until it is told to end; then unregisters, where the bus can be reached."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    Callback.runs = Runs(Path(folder), name)
    server = Server(("127.0.0.1", int(port)), Callback)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    registered = Path(folder) / f"{name}.registered"
    if not registered.exists():
        tool = {
            "name": f"{name}_once",
            "description": "Writes down that it ran.",
            "parameters": {"type": "object", "properties": {"token": {"type": "string"}}},
            "callback_url": f"http://127.0.0.1:{public_port}/run",
            "source": name,
            "timeout_seconds": 8,
        }
        threading.Thread(target=register, args=(main_server, tool, registered), daemon=True).start()
    signal.sigwait([signal.SIGTERM])
    registered.unlink(missing_ok=True)
    try:
        httpx.post(f"{main_server}/api/tools/clear", json={"source": name}, timeout=REQUEST_SECONDS, trust_env=False)
    except httpx.TransportError:
        pass  # the bus is away: it finds nobody at the URL then


if __name__ == "__main__":
    main(*sys.argv[1:])
