"""What a bus costs at rest: the time from its start to its ready line, and its memory while idle."""

from __future__ import annotations

import sys
import time

import psutil

from lab.benchmarks.children import Nursery
from lab.benchmarks.contest import Plan, start_bus
from lab.benchmarks.fact import Fact

SETTLE_SECONDS = 1.0
IMPORTS = {  # what is imported, and the most ms that it may take; the first is what it could take at the least
    "import grpc, grpc.aio, toolbus.v1.tool_bus_service_pb2_grpc": None,
    "import toolbus.sdk": 250.0,
    "from toolbus.sdk import Host, Plugin": 250.0,
}


def start(nursery: Nursery, plan: Plan, repeats: int) -> Fact:
    """Times a start of the process to its ready line."""
    samples = []
    with _installed(nursery) as own:
        for _ in range(repeats + 1):
            began_at = time.monotonic()
            bus, _ = start_bus(own, plan)
            samples.append((time.monotonic() - began_at) * 1e3)
            bus.end()
    return Fact("start", "start of the process, to its ready line", "ms", 1000.0, tuple(samples[1:]))


def memory(nursery: Nursery, plan: Plan, repeats: int) -> Fact:
    """Reads the resident memory of an idle bus without its HTTP gateway."""
    return Fact("memory", "resident memory of an idle bus, --http off", "MB", 60.0, _resident(nursery, plan, "off"))


def memory_http(nursery: Nursery, plan: Plan, repeats: int) -> Fact:
    """Reads the resident memory of an idle bus with its HTTP gateway."""
    samples = _resident(nursery, plan, "127.0.0.1:0")
    return Fact("memory_http", "resident memory of an idle bus with its HTTP gateway", "MB", 100.0, samples)


def import_sdk(nursery: Nursery, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Times imports of what plugins and hosts are written with, in fresh processes and in turns."""
    samples: dict[str, list[float]] = {what: [] for what in IMPORTS}
    with _installed(nursery) as own:
        for _ in range(repeats + 1):
            for what, seen in samples.items():
                seen.append(_import(own, what))
    return tuple(
        Fact("import_sdk", f"`{what}`, in a fresh process, processor time", "ms", aim, tuple(samples[what][1:]))
        for what, aim in IMPORTS.items()
    )


def _installed(nursery: Nursery) -> Nursery:
    """Returns a nursery whose processes find byte code, as those of an installed package do, once one has run."""
    return Nursery(
        {**nursery.environment, "PYTHONPYCACHEPREFIX": nursery.folder(), "PYTHONDONTWRITEBYTECODE": ""}  # "": not set
    )


def _import(nursery: Nursery, what: str) -> float:
    # Processor time: an import waits for nothing, and this is what it takes where nobody else is at work.
    timed = f"import time; began = time.process_time(); {what}; print((time.process_time() - began) * 1e3)"
    child = nursery.start("python", [sys.executable, "-c", timed])
    taken = float(child.line())
    child.end()
    return taken


def _resident(nursery: Nursery, plan: Plan, http: str) -> tuple[float, ...]:
    bus, _ = start_bus(nursery, plan, http=http)
    time.sleep(SETTLE_SECONDS)
    return (psutil.Process(bus.pid).memory_info().rss / 1e6,)
