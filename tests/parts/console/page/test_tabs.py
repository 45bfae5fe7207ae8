"""Several tabs of one browser: they share one stream, and a tab that is closed leaves it to another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.chromium import Page, chromium_page
from tests.parts.console.page.looking import open_console
from tests.parts.console.page.world import World, empty_world

pytestmark = pytest.mark.console

# What the page of a tab knows of the bus.
_STORE = "import(document.querySelector('script[type=module]').src.replace('app.mjs', 'store.mjs'))"


async def known(page: Page, name: str) -> Any:
    return await page.run(f"{_STORE}.then(store => store.{name})")


async def offer(world: World, name: str) -> None:
    """Registers a tool."""
    body = {
        "name": name,
        "callback_url": "http://127.0.0.1:9/x",
        "source": "later",
        "description": "",
        "parameters": {},
    }
    await world.post("/api/tools/register", body)


async def sees(page: Page, name: str) -> None:
    """Waits until the tab's list of tools has it. A tab that is behind another draws nothing."""
    await page.send("Page.bringToFront")
    await page.until(f"document.querySelector('.rows')?.innerText.includes('{name}')", f"{name} in the list")


async def test_tabs_share_one_stream_and_a_closed_one_leaves_it_to_the_next() -> None:
    async with empty_world() as world, chromium_page() as watching, watching.another() as second:
        async with watching.another() as first:
            await open_console(first, world, "tools")
            await second.send("Page.bringToFront")
            await open_console(second, world, "tools")
            await offer(world, "while_both_look")
            for each in (first, second):
                await sees(each, "while_both_look")
            assert [await known(each, "bus.value.watchers") for each in (first, second)] == [1, 1]
            streams = [sum(url.endswith("/api/console/stream") for url in each.requests) for each in (first, second)]
            assert streams == [1, 0]
        await offer(world, "when_one_was_closed")
        await sees(second, "when_one_was_closed")
        assert await known(second, "bus.value.watchers") == 1
        assert await known(second, "connection.value") == "live"
        assert second.complaints == []
