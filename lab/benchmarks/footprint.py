"""Measures an idle bus (from its start to its ready line, and its memory) and the time of importing the SDK."""

from __future__ import annotations

import sys
import time

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact
from lab.stage import LOOPBACK, BusProcess, Stage

SETTLE_SECONDS = 1.0
IMPORTS = {  # what is imported, and the ms that it should take at most; the first is the least that is possible
    "import grpc, grpc.aio, toolbus.v1.tool_bus_service_pb2_grpc": None,
    "import toolbus.sdk": 250.0,
    "from toolbus.sdk import Host, Plugin": 250.0,
}


def start(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Times a start of the process to its ready line."""
    samples = []
    with _installed(stage) as own:
        for _ in range(repeats + 1):
            began_at = time.monotonic()
            bus = own.bus().child
            samples.append((time.monotonic() - began_at) * 1e3)
            bus.end()
    return Fact("start", "start of the process, to its ready line", "ms", 1000.0, tuple(samples[1:]))


def memory(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Reads the resident memory of an idle bus without its HTTP gateway."""
    return _memory("memory", "resident memory of an idle bus, --http off", 60.0, stage.bus())


def memory_http(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Reads the resident memory of an idle bus with its HTTP gateway."""
    sentence = "resident memory of an idle bus with its HTTP gateway"
    return _memory("memory_http", sentence, 100.0, stage.bus(http=LOOPBACK))


def import_sdk(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Times imports of what plugins and hosts are written with, in fresh processes and in turns."""
    samples: dict[str, list[float]] = {what: [] for what in IMPORTS}
    with _installed(stage) as own:
        for _ in range(repeats + 1):
            for what, seen in samples.items():
                seen.append(_import(own, what))
    return tuple(
        Fact("import_sdk", f"`{what}`, in a fresh process, processor time", "ms", aim, tuple(samples[what][1:]))
        for what, aim in IMPORTS.items()
    )


def _installed(stage: Stage) -> Stage:
    """Returns a stage whose processes find byte code, as those of an installed package do, once one has run."""
    return Stage(
        {**stage.environment, "PYTHONPYCACHEPREFIX": stage.folder(), "PYTHONDONTWRITEBYTECODE": ""}  # "": not set
    )


def _import(stage: Stage, what: str) -> float:
    # Processor time: an import waits for nothing, and so other processes do not count.
    timed = f"import time; began = time.process_time(); {what}; print((time.process_time() - began) * 1e3)"
    child = stage.start("python", [sys.executable, "-c", timed])
    taken = float(child.line())
    child.end()
    return taken


def _memory(name: str, sentence: str, aim: float, bus: BusProcess) -> Fact:
    return Fact(name, sentence, "MB", aim, (bus.child.settled_bytes(SETTLE_SECONDS) / 1e6,))
