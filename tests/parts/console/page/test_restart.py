"""The console when its bus is killed and started again: it says so, and is whole again without a reload."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from lab.stage import free_ports
from tests.browser.chromium import Page, chromium_page
from tests.parts.console.page.looking import open_console
from tests.parts.console.page.world import World
from tests.parts.console.page.world_plugins import catalog
from tests.support.processes import Running
from toolbus import Host

pytestmark = pytest.mark.console

TOOLS = 50
_STATE_CHANGED = """new Promise(done => {
    const look = () => {
        if (document.querySelector('.top .state.%s')) { watcher.disconnect(); done(Date.now() / 1000); }
    };
    const watcher = new MutationObserver(look);
    watcher.observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});
    look();
})"""


@pytest_asyncio.fixture
async def page() -> AsyncIterator[Page]:
    async with chromium_page() as page:
        await page.size(1440, 900)
        yield page


async def test_a_killed_bus_is_seen_at_once_and_whole_again_without_a_reload(
    page: Page, tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    grpc, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    words = ("serve", "--ephemeral", "--grpc", grpc, "--http", http)
    plugin = catalog(grpc, TOOLS)
    with Running(tmp_path, *words) as first:
        await asyncio.to_thread(first.says, "toolbus ready")
        async with plugin, Host(grpc) as host:
            await plugin.ready()
            await open_console(page, World(grpc, http, host), "tools")
            await page.until("document.querySelectorAll('.row').length > 10")
            await page.run("void (globalThis.sameDocument = true)")
            lost = asyncio.create_task(page.run(_STATE_CHANGED % "bad"))
            await asyncio.sleep(0)
            killed = time.time()
            first.send(signal.SIGKILL)
            seen = await lost - killed
            with Running(tmp_path, *words) as second:
                await asyncio.to_thread(second.says, "toolbus ready")
                ready = time.time()
                whole = await page.run(_STATE_CHANGED % "ok") - ready
                await page.until("document.querySelectorAll('.row').length > 10")
                assert await page.run("globalThis.sameDocument") is True
                refused = [each for each in page.complaints if "ERR_CONNECTION_REFUSED" not in each]
                assert [each for each in refused if "ERR_INCOMPLETE_CHUNKED" not in each] == []
    figure("a killed bus is seen after", f"{seen:.2f} s (at most 1 s on a quiet machine)")
    figure("whole again after the bus is ready", f"{max(0.0, whole):.2f} s (at most 2 s on a quiet machine)")
    assert seen < 5
    assert whole < 10


async def test_a_bus_that_hangs_is_seen_though_nothing_breaks_and_its_return_too(
    page: Page, tmp_path: Path, figure: Callable[[str, str], None]
) -> None:
    grpc, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    with Running(tmp_path, "serve", "--ephemeral", "--grpc", grpc, "--http", http) as bus:
        await asyncio.to_thread(bus.says, "toolbus ready")
        async with Host(grpc) as host:
            await open_console(page, World(grpc, http, host), "tools")
            lost = asyncio.create_task(page.run(_STATE_CHANGED % "bad"))
            await asyncio.sleep(0)
            hung = time.time()
            bus.send(signal.SIGSTOP)
            try:
                seen = await lost - hung
            finally:
                bus.send(signal.SIGCONT)
            await page.run(_STATE_CHANGED % "ok")
    figure("a bus that hangs is seen after", f"{seen:.2f} s (at most 5 s on a quiet machine)")
    assert seen < 10
