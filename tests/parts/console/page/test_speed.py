"""Measures what the console costs a browser and a bus, with a thousand tools and ten thousand calls a minute."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from lab.stage import free_ports
from tests.browser.chromium import Page, chromium_page
from tests.parts.console.page.looking import MAX_ROWS, drawn_rows, open_console
from tests.parts.console.page.world import World
from tests.parts.console.page.world_plugins import catalog
from tests.support.processes import Running
from tests.support.waiting import within
from toolbus import Host

pytestmark = pytest.mark.console

MINUTES = float(os.environ.get("TOOLBUS_CONSOLE_MINUTES", "0.4"))
CALLS_A_SECOND = 10_000 / 60
MAX_HEAP_GROWTH = 5_000_000  # bytes
Figure = Callable[[str, str], None]
# Presses no key: waits for one, and returns the milliseconds from it to the end of the next frame.
_KEY_TO_FRAME = """new Promise(done => addEventListener('keydown', event => {
    requestAnimationFrame(() => {
        const channel = new MessageChannel();
        channel.port1.onmessage = () => done(performance.now() - event.timeStamp);
        channel.port2.postMessage(0);
    });
}, {once: true, capture: true}))"""


class Served(Running):
    """A bus in an interpreter of its own, as an operator starts it."""

    def _command(self, words: tuple[str | Path, ...]) -> list[str | Path]:
        return [sys.executable, "-m", "toolbus.cli", *words]


@pytest_asyncio.fixture
async def page() -> AsyncIterator[Page]:
    async with chromium_page() as page:
        await page.size(1440, 900)
        await page.media()
        yield page


def addresses() -> tuple[str, str]:
    grpc, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    return grpc, http


async def test_a_thousand_tools_are_drawn_soon_after_the_start_of_a_bus(
    page: Page, tmp_path: Path, figure: Figure
) -> None:
    grpc, http = addresses()
    plugin = catalog(grpc)
    async with plugin:  # waits for its bus
        began = time.monotonic()
        with Served(tmp_path, "serve", "--ephemeral", "--grpc", grpc, "--http", http) as bus:
            await asyncio.to_thread(bus.says, "toolbus ready")
            ready = time.monotonic()
            await page.open(f"http://{http}/console#/tools")
            await page.until("document.querySelectorAll('.row').length > 10")
            drawn = time.monotonic()
            work = sum(psutil.Process(bus.process.pid).cpu_times()[:2])
            page_work = (await page.counters())["TaskDuration"]
            async with Host(grpc) as host:
                assert len(await within(host.list())) == 1000
            assert await drawn_rows(page) <= MAX_ROWS
    figure("bus ready after its start", f"{ready - began:.2f} s")
    figure("1,000 tools drawn after the start of the bus", f"{drawn - began:.2f} s (at most 1 s on a quiet machine)")
    figure("1,000 tools drawn after the bus is ready", f"{drawn - ready:.2f} s")
    figure("processor time until then", f"{work:.2f} s of the bus, its start included, {page_work:.2f} s of the page")
    assert drawn - began < 20


async def test_a_key_in_the_filter_reaches_the_screen_at_once(page: Page, tmp_path: Path, figure: Figure) -> None:
    grpc, http = addresses()
    plugin = catalog(grpc)
    with Running(tmp_path, "serve", "--ephemeral", "--grpc", grpc, "--http", http) as bus:
        await asyncio.to_thread(bus.says, "toolbus ready")
        async with plugin, Host(grpc) as host:
            await plugin.ready()
            await open_console(page, World(grpc, http, host), "tools")
            await page.press("/")
            times = []
            for key in "invoice":
                measured = asyncio.create_task(page.run(_KEY_TO_FRAME))
                await asyncio.sleep(0.1)
                await page.press(key)
                times.append(await measured)
            await page.until("document.querySelector('.row')?.innerText.includes('invoice')")
            assert 1 < await drawn_rows(page) <= 30  # 25 verbs
    times.sort()
    figure(
        "a key in the filter to the next frame", f"median {times[3]:.0f} ms, most {times[-1]:.0f} ms (at most 50 ms)"
    )
    assert times[3] < 250


async def test_a_stream_of_calls_neither_grows_the_page_nor_busies_it(
    page: Page, tmp_path: Path, figure: Figure
) -> None:
    grpc, http = addresses()
    plugin = catalog(grpc)
    with Served(tmp_path, "serve", "--ephemeral", "--grpc", grpc, "--http", http) as bus:
        await asyncio.to_thread(bus.says, "toolbus ready")
        process = psutil.Process(bus.process.pid)
        async with plugin, Host(grpc) as host:
            await plugin.ready()
            calling = asyncio.create_task(call_steadily(host, CALLS_A_SECOND, _mixed))
            try:
                used = {}
                for watched in (False, True):
                    if watched:
                        await open_console(page, World(grpc, http, host), "calls")
                        await asyncio.sleep(3)
                        heap, counters = await page.heap(), await page.counters()
                    before, began = sum(process.cpu_times()[:2]), time.monotonic()
                    await asyncio.sleep(MINUTES * 60 if watched else min(MINUTES * 60, 8))
                    used[watched] = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
                seconds = time.monotonic() - began
                script = (await page.counters())["ScriptDuration"] - counters["ScriptDuration"]
                task = (await page.counters())["TaskDuration"] - counters["TaskDuration"]
                growth = await page.heap() - heap
                assert await drawn_rows(page) <= MAX_ROWS
                assert page.complaints == []
            finally:
                calling.cancel()
    figure("watched", f"{seconds:.0f} s at {CALLS_A_SECOND * 60:,.0f} calls a minute")
    figure("heap of the page", f"{heap / 1e6:.1f} MB, then {growth / 1e6:+.1f} MB (at most + 5 MB)")
    figure("script of the page", f"{script / seconds:.1%} of a core (at most 10 %), all its work {task / seconds:.1%}")
    figure("bus", f"{used[False]:.1%} of a core unwatched, {used[True]:.1%} watched (at most 1 % more)")
    assert growth <= MAX_HEAP_GROWTH


def _mixed(number: int) -> tuple[str, dict[str, Any]]:
    """Returns a call of one of five tools; a tenth of them fail."""
    names = ("find_order", "list_shipment", "count_pallet", "read_invoice", "cancel_order")
    return names[number % 5], {"id": number if number % 10 == 0 else str(number)}


async def call_steadily(
    host: Host, calls_a_second: float, call_of: Callable[[int], tuple[str, dict[str, Any] | None]]
) -> None:
    """Makes the calls of all numbers from 0 on, at an even pace."""
    began, made = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - began) * calls_a_second)
        calls = [call_of(number) for number in range(made, due)]
        made = due
        if calls:
            await host.call_many(calls)
        await asyncio.sleep(0.05)
