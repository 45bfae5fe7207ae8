"""What a bus costs at rest: the time from its start to its ready line, and its memory while idle."""

from __future__ import annotations

import sys
import time

import psutil

from benchmarks.children import Nursery
from benchmarks.contest import Plan, start_bus
from benchmarks.fact import Fact

SETTLE_SECONDS = 1.0


def start(nursery: Nursery, plan: Plan, repeats: int) -> Fact:
    """Times a start of the process to its ready line."""
    samples = []
    for _ in range(repeats):
        began_at = time.monotonic()
        bus, _ = start_bus(nursery, plan)
        samples.append((time.monotonic() - began_at) * 1e3)
        bus.end()
    return Fact("start", "start of the process, to its ready line", "ms", 1000.0, tuple(samples))


def memory(nursery: Nursery, plan: Plan, repeats: int) -> Fact:
    """Reads the resident memory of an idle bus without its HTTP gateway."""
    return Fact("memory", "resident memory of an idle bus, --http off", "MB", 60.0, _resident(nursery, plan, "off"))


def memory_http(nursery: Nursery, plan: Plan, repeats: int) -> Fact:
    """Reads the resident memory of an idle bus with its HTTP gateway."""
    samples = _resident(nursery, plan, "127.0.0.1:0")
    return Fact("memory_http", "resident memory of an idle bus with its HTTP gateway", "MB", 100.0, samples)


def import_sdk(nursery: Nursery, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Times imports of what plugins and hosts are written with, in fresh processes."""
    return tuple(
        Fact("import_sdk", f"`{what}`, in a fresh process", "ms", 250.0, _imports(nursery, what, repeats))
        for what in ("import toolbus.sdk", "from toolbus.sdk import Host, Plugin")
    )


def _imports(nursery: Nursery, what: str, repeats: int) -> tuple[float, ...]:
    timed = f"import time; began = time.perf_counter(); {what}; print((time.perf_counter() - began) * 1e3)"
    samples = []
    for _ in range(repeats):
        child = nursery.start("python", [sys.executable, "-c", timed])
        samples.append(float(child.line()))
        child.end()
    return tuple(samples)


def _resident(nursery: Nursery, plan: Plan, http: str) -> tuple[float, ...]:
    bus, _ = start_bus(nursery, plan, http=http)
    time.sleep(SETTLE_SECONDS)
    return (psutil.Process(bus.pid).memory_info().rss / 1e6,)
