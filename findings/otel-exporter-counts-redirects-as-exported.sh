#!/bin/sh
# opentelemetry-exporter-otlp-proto-http 1.45.2 reports SUCCESS for spans that no collector has received.
#
# One would expect: a collector's address that answers with a redirect (http → https, a moved path) either gets the spans
# at the new place, or the exporter reports FAILURE, so that the program counts them as lost.
# What happens: the exporter does not follow the redirect, which is right for it, and takes the answer for a success: the
# spans are gone, and `export` returns SUCCESS without a line in the log.
#
# Prints the version, and for each status what arrived and what was reported. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check \
  opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-sdk==1.45.2
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

status, seen = 301, []


class Collector(BaseHTTPRequestHandler):
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        moved = self.path == "/v1/traces"
        if not moved:
            seen.append(f"{self.command} with {'the spans' if body else 'no body'}")
        self.send_response(status if moved else 200)
        if moved:
            self.send_header("Location", "/new/v1/traces")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET = answer

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
memory, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(memory))
with provider.get_tracer("t").start_as_current_span("s"):
    pass
spans = memory.get_finished_spans()
print("opentelemetry-exporter-otlp-proto-http", importlib.metadata.version("opentelemetry-exporter-otlp-proto-http"))
surprises = 0
STATUSES = (301, 302, 303, 307, 308)
for status in STATUSES:
    seen.clear()
    exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces", timeout=5)
    result = exporter.export(spans)
    print(f"HTTP {status}: the new place got {seen}, export returned {result.name}")
    surprises += result is SpanExportResult.SUCCESS and seen == []
server.shutdown()
print("spans that nobody received are reported as exported" if surprises == len(STATUSES) else "this has changed")
raise SystemExit(surprises != len(STATUSES))
PY
