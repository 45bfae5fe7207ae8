"""The ways through the console: back from what is open, keys of what has the focus, questions of what is shown."""

from __future__ import annotations

import pytest

from tests.browser.chromium import Page
from tests.parts.console.page.looking import go, open_console, settled
from tests.parts.console.page.world import World

pytestmark = [pytest.mark.console, pytest.mark.asyncio(loop_scope="module")]

DETAILS = ("tools/travel/plan_trip", "errors/charge_card/TOOL/billing", "sources/billing")


@pytest.mark.parametrize("route", DETAILS)
async def test_escape_closes_a_detail_at_once_and_leads_to_the_list(page: Page, world: World, route: str) -> None:
    await open_console(page, world, route)
    await page.press("Escape")
    await settled(page)
    assert await page.run("location.hash") == "#/" + route.split("/")[0]
    assert await page.run("document.querySelector('.detail') === null")
    assert await page.run("document.querySelector('.list').checkVisibility()")


async def test_keys_that_scroll_an_output_with_the_focus_do_not_move_in_the_list(page: Page, world: World) -> None:
    supervisor = next(each for each in await supervised(world) if each["plugin"] == "billing")
    await open_console(page, world, f"logs/{supervisor['source']}/billing")
    await page.until("document.querySelectorAll('.log .line').length > 0", "the first lines")
    cursor = "document.querySelector('.row.cursor')?.innerText"
    before = await page.run(cursor)
    await page.run("document.querySelector('.log').focus()")
    await page.press("Home", "End", "ArrowUp")
    await settled(page)
    assert await page.run(cursor) == before
    await page.run("document.activeElement.blur()")
    for key, row in (("Home", "first"), ("End", "last")):
        await page.press(key)
        await page.until(f"!!document.querySelector('.row.cursor:{row}-child')", f"the cursor at the {row} row")


async def test_a_question_goes_with_the_page_that_asked_it(page: Page, world: World) -> None:
    await open_console(page, world, "sources/travel")
    await page.press("d")
    await page.until("!!document.querySelector('dialog[open] input')", "the question")
    await go(page, "calls")
    await page.until("!document.querySelector('dialog')", "no question")


async def supervised(world: World) -> list[dict[str, str]]:
    return list((await world.post("/api/bus/plugin_logs", {}))["output"]["plugins"])


async def test_a_source_names_its_tools_for_certain_users_too(page: Page, world: World) -> None:
    await open_console(page, world, "sources/billing")
    await page.until("document.querySelector('.detail').innerText.includes('All 4')", "its tools")
    text = await page.run("document.querySelector('.detail').innerText")
    assert "4 tools" in text
    assert "charge_card" in text
    assert "only some users" not in text
