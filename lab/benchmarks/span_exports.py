"""Measures what exported spans cost a bus: its processor time a call with and without them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import uvloop

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact
from lab.load import peer
from lab.stage import Stage

IN_FLIGHT = 64
SPANS_PER_SECOND = 100  # as many as a bus samples by default
WINDOW_SECONDS = 2.0
SETTLE_SECONDS = 1.5  # after each window, until its last spans are exported: they wait for 1 s
SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Collector(ThreadingHTTPServer):
    """Answers each request, and counts them."""

    daemon_threads = True
    requests = 0


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if isinstance(self.server, Collector):
            self.server.requests += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector on a free port."""
    server = Collector(("127.0.0.1", 0), _Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def exporter(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Compares windows with spans and without, which take turns, of one bus."""
    with collecting() as collector:
        stage.environment["TOOLBUS_TRACES"] = f"http://127.0.0.1:{collector.server_port}"
        bus = plan.bus(stage)
        del stage.environment["TOOLBUS_TRACES"]
        stage.module("load.plugin", bus.grpc).line()
        pairs = uvloop.run(_windows(bus.grpc, psutil.Process(bus.child.pid), repeats))
        if not collector.requests:
            raise RuntimeError("the bus has exported nothing")
    title, line = f"Processor time of a bus that exports {SPANS_PER_SECOND} spans a second", f"{IN_FLIGHT} in flight"
    more = tuple(100.0 * (traced / plain - 1.0) for plain, traced in pairs)
    return (
        Fact("exporter", "without spans", "µs a call", None, tuple(plain for plain, _ in pairs), title, line),
        Fact("exporter", "with spans", "µs a call", None, tuple(traced for _, traced in pairs), title, line),
        Fact("exporter", "more", "%", 3.0, more, title, line),
    )


async def _windows(address: str, bus: psutil.Process, pairs: int) -> list[tuple[float, float]]:
    """Returns the bus's microseconds a call without and with spans, of pairs of windows."""
    host = peer.Peer(address)
    await host.attach("bench-host", [])
    await _call(host, traced=True)  # warms up
    found = []
    for number in range(pairs):
        each = {}
        for traced in (False, True) if number % 2 else (True, False):
            before = bus.cpu_times()
            calls = await _call(host, traced=traced)
            await asyncio.sleep(SETTLE_SECONDS)
            after = bus.cpu_times()
            each[traced] = (after.user + after.system - before.user - before.system) / calls * 1e6
        found.append((each[False], each[True]))
    await host.close()
    return found


async def _call(host: peer.Peer, *, traced: bool) -> int:
    """Keeps calls in flight for one window; returns how many there were."""
    calls = [peer.call(str(slot), slot) for slot in range(IN_FLIGHT)]
    now = time.monotonic()
    ends_at, trace_at, made, pending = now + WINDOW_SECONDS, now, IN_FLIGHT, IN_FLIGHT
    host.calls += calls
    host.flush()
    while pending:
        frame = await host.read()
        if frame is None or any(result.is_error for result in frame.results):
            raise RuntimeError("a call failed")
        now = time.monotonic()
        if now >= ends_at:
            pending -= len(frame.results)
            continue
        for result in frame.results:
            call = calls[int(result.call_id)]
            call.traceparent = ""
            if traced and now >= trace_at:
                call.traceparent = SAMPLED
                trace_at += 1.0 / SPANS_PER_SECOND
            host.calls.append(call)
        made += len(frame.results)
        host.flush()
    return made
