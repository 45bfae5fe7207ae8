"""A collector of spans that is stopped as a process costs the bus spans, and neither calls nor its end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import pytest

from tests.support.processes import ROOT, environment
from tests.support.waiting import within
from toolbus import Host
from toolbus.parts.observability.span_export import MAX_BATCH, MAX_WAITING
from toolbus.parts.observability.traces_room import TracesRoom
from toolbus.protocol.limits import Timings
from toolbus.testing import running_bus

CALLS = MAX_WAITING + 2 * MAX_BATCH  # more than the queue and a request under way have room for


@contextmanager
def collector_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs a collector; yields the process and its URL."""
    command = [sys.executable, "-m", "tests.support.collector"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment({})) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()  # ends a stopped process, too


async def test_while_a_collector_is_stopped_every_call_ends_and_so_does_the_bus(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with collector_process() as (process, url):
        assert process.stdout is not None
        async with AsyncExitStack() as running:
            settings: dict[str, Any] = {"traces": url, "trace_ratio": 1.0, "trace_most": 10 * CALLS}
            bus = await running.enter_async_context(running_bus(**settings, timings=Timings(span_seconds=0.01)))
            room = bus.core.rooms.find(TracesRoom)
            assert room is not None
            bus.tool(add)
            await within(bus.call("add", {"a": 1, "b": 2}))
            assert await within(asyncio.to_thread(process.stdout.readline)) == "1\n"
            process.send_signal(signal.SIGSTOP)
            async with Host(bus.grpc_addresses[0]) as host:
                for _ in range(8):
                    results = await within(host.call_many([("add", {"a": 1, "b": 2})] * (CALLS // 8)))
                    assert {result.output for result in results} == {3}
            assert room.dropped >= CALLS - MAX_WAITING - MAX_BATCH
            await within(running.aclose())
        caplog.clear()
        async with AsyncExitStack() as running:
            bus = await running.enter_async_context(running_bus(**settings, timings=Timings(span_seconds=60.0)))
            bus.tool(add)
            await within(bus.call("add", {"a": 1, "b": 2}))
            await within(running.aclose())
    # Nobody waited for that request, which begins when the bus stops and would end after EXPORT_SECONDS.
    assert "spans or more were not exported when the bus stopped" in caplog.text


def add(a: int, b: int) -> int:
    return a + b
