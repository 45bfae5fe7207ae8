"""Every page of the console, in the demo world, as a person with eyes and a keyboard meets it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.browser.chromium import Page
from tests.parts.console.page.looking import (
    MAX_ROWS,
    PAGES,
    drawn_rows,
    foreign,
    go,
    open_console,
    settled,
    too_pale,
    unseen_focus,
)
from tests.parts.console.page.world import World
from toolbus.protocol.limits import Limits

# Where the page's own entry of the navigation is.
_CURRENT = "(box => [box.left, box.right])(document.querySelector('.pages [aria-current]').getBoundingClientRect())"

pytestmark = [pytest.mark.console, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("route", PAGES)
async def test_all_text_of_a_page_can_be_read(page: Page, world: World, route: str, scheme: str) -> None:
    await page.media(scheme=scheme)
    await open_console(page, world, route)
    assert await too_pale(page) == []
    assert page.complaints == []


@pytest.mark.parametrize("route", PAGES)
async def test_what_has_the_focus_is_seen(page: Page, world: World, route: str) -> None:
    await open_console(page, world, route)
    assert await unseen_focus(page) == []


async def test_no_page_asks_anything_of_another_host(page: Page, world: World) -> None:
    await open_console(page, world)
    for route in PAGES:
        await go(page, route)
    assert foreign(page, world) == []
    assert page.complaints == []


async def test_a_list_of_a_thousand_tools_draws_only_the_rows_in_sight(page: Page, world: World) -> None:
    await open_console(page, world, "tools")
    await page.until("document.querySelectorAll('.row').length > 10")
    assert await drawn_rows(page) <= MAX_ROWS
    await page.run("document.querySelector('.rows').focus()")
    await page.press("End")
    await settled(page)
    assert await drawn_rows(page) <= MAX_ROWS
    assert page.complaints == []


async def test_the_page_of_the_bus_shows_the_limits_in_force(page: Page, world: World) -> None:
    await open_console(page, world, "bus")
    await page.until("!!document.querySelector('details summary')", "the limits of the bus")
    await page.run("document.querySelector('details summary').click()")
    shown = await page.run("document.querySelector('details').innerText")
    assert all(limit.name in shown for limit in fields(Limits))
    assert "arguments_bytes\n1 MiB" in shown, shown


async def test_the_pages_are_reached_by_their_keys(page: Page, world: World) -> None:
    await open_console(page, world)
    for key, route in zip("hstcelpkob", PAGES, strict=True):
        await page.press("g", key)
        await page.until(f"location.hash.startsWith('#/{route}')")
    await page.press("?")
    await page.until("!!document.querySelector('dialog[open]')")
    await page.press("Escape")
    await page.until("!document.querySelector('dialog[open]')")


@pytest.mark.parametrize("route", PAGES)
async def test_a_phone_shows_a_page_without_scrolling_sideways_and_where_it_is(
    page: Page, world: World, route: str
) -> None:
    await page.size(360, 740, phone=True)
    try:
        await open_console(page, world, route)
        assert await page.run("document.documentElement.scrollWidth") <= 360
        left, right = await page.run(_CURRENT)
        assert left >= 0
        assert right <= 360
    finally:
        await page.size(1440, 900)
