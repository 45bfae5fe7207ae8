"""Measures what `toolbus top` costs its machine and a bus, with a thousand tools and a thousand calls a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.parts.console.page.test_speed import Served, addresses, call_steadily
from tests.parts.console.page.world_plugins import catalog
from tests.parts.console.top.on_terminal import OnTerminal
from tests.support.waiting import until
from toolbus import Host

pytestmark = pytest.mark.console

CALLS_A_SECOND = 1_000
SECONDS = 8.0


async def test_a_thousand_tools_at_a_thousand_calls_a_second_cost_the_screen_little(
    tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    grpc, http = addresses()
    plugin = catalog(grpc)
    with Served(tmp_path, "serve", "--ephemeral", "--grpc", grpc, "--http", http) as bus:
        await asyncio.to_thread(bus.says, "toolbus ready")
        async with plugin, Host(grpc) as host:
            await plugin.ready()
            names = [tool.name for tool in await host.list()]
            calling = asyncio.create_task(
                call_steadily(host, CALLS_A_SECOND, lambda number: (names[number % len(names)], None))
            )
            try:
                await asyncio.sleep(2)
                served = psutil.Process(bus.process.pid)
                alone = await _use_of(served)
                began = time.monotonic()
                with OnTerminal("--bus", grpc) as top:
                    await until(lambda: "serving" in top.text, "the first frame")
                    first, process = time.monotonic() - began, psutil.Process(top.process.pid)
                    work = sum(process.cpu_times()[:2])
                    await asyncio.sleep(2)
                    own, watched = await asyncio.gather(_use_of(process, top), _use_of(served))
                    assert "Tools 1,000" in top.text
            finally:
                calling.cancel()
    figure("first frame of toolbus top", f"{first:.2f} s (at most 1.5 s on a quiet machine), {work:.2f} s of it work")
    figure("toolbus top", f"{own:.1%} of a core at {CALLS_A_SECOND:,} calls/s of 1,000 tools (at most 2 %)")
    figure("bus with toolbus top", f"{alone:.1%} of a core unwatched, {watched:.1%} watched")
    assert first < 15
    assert own < 0.1


async def _use_of(process: psutil.Process, terminal: OnTerminal | None = None) -> float:
    """Returns the share of a core that a process uses for some seconds; its terminal is read meanwhile."""
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    while time.monotonic() < began + SECONDS:
        await asyncio.sleep(0.1)
        if terminal is not None:
            assert terminal.text
    return float((sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began))
