"""Serves a recorded model in a thread, for programs that run to their end: it calls a tool, then answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.parts.models.loop.model_server import CONTENT_TYPES, Recording


@contextmanager
def answering(flavour: str) -> Iterator[str]:
    """Serves a recording of chat completions, in a thread, on loopback. Yields its base URL.

    A request that offers tools and ends with words is answered with a call, every other one with words.
    """
    recording = Recording.read(flavour)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_question = "tools" in request and request["messages"][-1]["role"] == "user"
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPES[recording.frames])
            self.end_headers()
            for event in recording.written("one" if is_question else "text"):
                self.wfile.write(event)

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()
