"""Measures drop-in tools: from a saved file to the first answer of its tool, from a start, and a process's memory.

A tool counts from its first answer, to a host that calls until it gets one. The contest is between one function as a
plugin file and as a drop-in tool.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact
from lab.child import Child, ChildFailed
from lab.load import workload
from lab.stage import Stage

if TYPE_CHECKING:
    from toolbus.sdk import SyncHost

SETTLE_SECONDS = 1.0
MAX_SECONDS = 30.0
FORECAST = f"""
import json
from toolbus.sdk import llm_tool

@llm_tool(name={workload.TOOL_NAME!r}, description={workload.DESCRIPTION!r}, allow_repeat=True,
          parameters=json.loads({workload.PARAMETERS_JSON!r}))
async def forecast(place: str, days: int, note: str = "") -> dict:
    return {{"celsius": 21.5, "sky": "clear"}}
"""


def saved(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Times a file that is added to a folder that is followed, to the first answer of its tool."""
    samples = []
    with _tools(stage) as (folder, address, host):
        _run(stage, address, folder)
        _write(folder, "first")
        _first_answer(host, "first", time.monotonic())
        for number in range(repeats):
            began_at = time.monotonic()
            _write(folder, f"tool_{number}")
            samples.append(_first_answer(host, f"tool_{number}", began_at))
    return Fact("saved", "a file is saved, to the first answer of its tool", "ms", 2000.0, tuple(samples))


def folder_start(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Times a start of ``toolbus run DIR``, to the first answer of a tool."""
    samples = []
    with _tools(stage) as (folder, address, host):
        for number in range(repeats):
            _write(folder, f"tool_{number}")
            began_at = time.monotonic()
            running = _run(stage, address, folder)
            samples.append(_first_answer(host, f"tool_{number}", began_at))
            running.end()
    return Fact("folder_start", "start of `toolbus run DIR`, to the first answer", "ms", 3000.0, tuple(samples))


def dropin_memory(stage: Stage, plan: Plan, repeats: int) -> Fact:
    """Reads the resident memory of an idle process of drop-in tools."""
    with _tools(stage) as (folder, address, host):
        running = _run(stage, address, folder)
        _write(folder, "tool")
        _first_answer(host, "tool", time.monotonic())
        time.sleep(SETTLE_SECONDS)
        children = psutil.Process(running.pid).children()  # the other one is the lifeline, which is small
        sample = max(each.memory_info().rss for each in children) / 1e6
    return Fact("dropin_memory", "resident memory of an idle process of drop-in tools", "MB", 80.0, (sample,))


@contextmanager
def _tools(stage: Stage) -> Iterator[tuple[Path, str, SyncHost]]:
    """Yields an empty folder, the address of a bus, and a host on that."""
    from toolbus.sdk import SyncHost  # imports grpc, which reads GRPC_EXPERIMENTS at that moment

    _, address, _ = stage.bus()
    with tempfile.TemporaryDirectory(prefix="toolbus-") as folder, SyncHost(address) as host:
        yield Path(folder), address, host


def _write(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text(f"def run():\n    return 1\n\n\nTOOL_NAME = {name!r}\n")


def _run(stage: Stage, address: str, what: Path) -> Child:
    return stage.start("toolbus run", [sys.executable, "-m", "toolbus.cli", "run", str(what), "--bus", address])


def _first_answer(host: SyncHost, name: str, began_at: float, arguments: str = "{}") -> float:
    """Calls a tool until it answers; returns the milliseconds since a moment."""
    while (result := host.call(name, arguments)).error is not None:
        if time.monotonic() - began_at > MAX_SECONDS:
            raise ChildFailed(f"tool {name!r} did not answer: {result.error}")
        time.sleep(0.002)
    return (time.monotonic() - began_at) * 1e3


def offered(stage: Stage, plan: Plan, *, alone: bool) -> tuple[Child, str]:
    """Starts a bus and the tool, by itself as a plugin file or as the one file of a folder of drop-in tools."""
    from toolbus.sdk import SyncHost

    bus, address, _ = stage.bus()
    folder = Path(stage.folder())
    file = folder / "forecast.py"
    file.write_text(FORECAST)
    _run(stage, address, file if alone else folder)
    with SyncHost(address) as host:
        _first_answer(host, workload.TOOL_NAME, time.monotonic(), workload.arguments_json(0))
    return bus, address
