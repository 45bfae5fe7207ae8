"""Receives spans as a collector of OpenTelemetry does: an HTTP server of this process that decodes OTLP.

As a program it prints its URL, and then how many spans have arrived whenever there are more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.waiting import until


@dataclass(frozen=True)
class Received:
    """A span as it arrived; ids in hexadecimal digits."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    service: str
    scope: str
    attributes: dict[str, Any]
    events: list[str]
    failed: bool
    started: int
    ended: int
    tracestate: str


@dataclass
class Collector:
    """What arrived, and how the next requests are answered.

    Attributes:
        raw: the bodies of all requests.
        status: of the answers.
        location: of the answers; "" for none.
        held: while it is clear, no request is answered.
    """

    url: str = ""
    spans: list[Received] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    status: int = 200
    location: str = ""
    held: threading.Event = field(default_factory=threading.Event)

    async def wait(self, count: int) -> list[Received]:
        """Returns the spans once so many have arrived."""
        await until(lambda: len(self.spans) >= count)
        return self.spans

    def take(self, body: bytes) -> None:
        self.raw.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(resource.resource.attributes).get("service.name", "")
            for name, span in ((scope.scope.name, span) for scope in resource.scope_spans for span in scope.spans):
                self.spans.append(
                    Received(
                        *(span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.kind),
                        service=service,
                        scope=name,
                        attributes=_values(span.attributes),
                        events=[event.name for event in span.events],
                        failed=span.status.code == 2,
                        started=span.start_time_unix_nano,
                        ended=span.end_time_unix_nano,
                        tracestate=span.trace_state,
                    )
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """Runs a collector on a free port."""
    seen = Collector()
    seen.held.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.held.wait()
            seen.paths.append(self.path)
            seen.headers.append({name.lower(): value for name, value in self.headers.items()})
            if seen.status == 200:
                seen.take(body)
            self.send_response(seen.status)
            if seen.location:
                self.send_header("Location", seen.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    seen.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        seen.held.set()
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with collector() as received:
        print(received.url, flush=True)
        told = 0
        while True:
            time.sleep(0.01)
            if len(received.spans) > told:
                told = len(received.spans)
                print(told, flush=True)
