"""What an operator sees in a glance, what failures come with, and what a phone tells about pages off its bar."""

from __future__ import annotations

import asyncio

import pytest

from tests.browser.chromium import Page
from tests.parts.console.page.looking import open_console, settled
from tests.parts.console.page.world import World, empty_world
from tests.support.waiting import within
from toolbus import Host
from toolbus.parts.guards.settings import ApprovalRule
from toolbus.testing import running_bus

pytestmark = [pytest.mark.console, pytest.mark.asyncio(loop_scope="module")]

_VERDICT = "document.querySelector('.verdict')?.innerText ?? ''"
CELL = "document.querySelector('.row .cut')"
_TEXT = "document.querySelector('%s')?.innerText ?? ''"


async def test_the_first_page_says_what_does_not_work_and_leads_there(page: Page, world: World) -> None:
    await open_console(page, world, "")
    await page.until(f"/things do not work/.test({_VERDICT})", "the verdict")
    await page.until("document.querySelector('.findings')?.innerText.includes('gate-scanner')", "the sources")
    text = await page.run(_TEXT % ".findings")
    assert "render_invoice" in text
    assert "its connection broke" in text
    assert "charge_card" not in text.split("yearly_report")[0]  # what a tool reports is not a tool that does not work
    await page.run("[...document.querySelectorAll('.findings a')].find(a => a.innerText === 'render_invoice').click()")
    await page.until("location.hash.startsWith('#/errors/render_invoice/UNAVAILABLE/billing')")
    assert page.complaints == []


async def test_a_bus_where_nothing_fails_says_that_all_is_well_and_what_was_looked_at(page: Page) -> None:
    async with empty_world() as world:
        await open_console(page, world, "")
        await page.until(f"{_VERDICT}.startsWith('All is well')", "the verdict")
        await page.until(f"{_VERDICT}.includes('approvals')", "every area")
        areas = "tools, sources, plugins, mounts, keys, approvals and bus were looked at"
        assert areas in (await page.run(_VERDICT)).replace("\n", " ")
        assert page.complaints == []
        assert (await world.assistant.call("toolbus:calls")).unwrap() == []  # what the page reads is none of the calls


async def test_an_error_has_its_text_and_what_the_plugin_wrote_at_that_moment(page: Page, world: World) -> None:
    await open_console(page, world, "errors/charge_card/TOOL/billing")
    await page.until("!!document.querySelector('.detail pre.text')", "its output")
    text = await page.run(_TEXT % ".detail")
    assert "the bank declined the card" in text
    assert "charging 2500.00 EUR from C-1043" in await page.run(_TEXT % ".detail pre.text")


async def test_a_source_without_output_says_why(page: Page, world: World) -> None:
    await open_console(page, world, "errors/book_seat/TOOL/travel")
    await page.until(f"({_TEXT % '.detail'}).includes('travel has no output here')", "why there is none")
    assert "toolbus run did not start it" in await page.run(_TEXT % ".detail")
    await open_console(page, world, "sources/pager")
    await page.until(f"({_TEXT % '.detail'}).includes('none here: its tools are called at a URL')", "why there is none")
    await open_console(page, world, "sources/plugin:weather")  # whose file is called plugin.py
    await page.until(f"/lines? of plugin/.test({_TEXT % '.detail'})", "where its output is")
    await open_console(page, world, "logs")
    await page.until(f"({_TEXT % '.rows'}).includes('pager no output here')", "the rows without output")


async def test_texts_of_errors_that_are_not_recorded_are_recorded_after_a_press(page: Page) -> None:
    async with (
        running_bus(http="127.0.0.1:0", record_errors="never") as bus,
        Host(bus.grpc_addresses[0], source="assistant") as host,
    ):

        @bus.tool
        def fails() -> None:
            raise LookupError("no account 4711")

        await host.call("fails")
        world = World(bus.grpc_addresses[0], str(bus.http_address), host)
        await open_console(page, world, "errors")
        await page.until("!!document.querySelector('.list .note button')", "the button")
        await page.run("document.querySelector('.list .note button').click()")
        await page.until("!document.querySelector('.list .note')", "that they are recorded")
        await host.call("fails")
        await page.until(f"({_TEXT % '.rows'}).includes('no account 4711')", "the text of the next error")


async def test_a_call_that_waits_is_found_and_allowed(page: Page) -> None:
    rules = (ApprovalRule(("pay",)),)
    async with (
        running_bus(http="127.0.0.1:0", approvals=rules) as bus,
        Host(bus.grpc_addresses[0], source="assistant") as host,
    ):

        def pay(amount: int) -> str:
            return f"paid {amount}"

        bus.tool(timeout=120)(pay)
        calling = asyncio.create_task(host.call("pay", {"amount": 5}))
        world = World(bus.grpc_addresses[0], str(bus.http_address), host)
        await open_console(page, world, "")
        await page.until(f"({_TEXT % '.findings'}).includes('a call of assistant waits for you')", "the call")
        await page.run("document.querySelector('.findings a').click()")
        await page.until("!!document.querySelector('.panel .primary')", "the button")
        assert '{"amount":5}' in await page.run(_TEXT % ".panel")
        await page.run("document.querySelector('.panel .primary').click()")
        assert (await within(calling)).text == "paid 5"


async def test_tools_stand_with_their_descriptions_at_every_width(page: Page, world: World) -> None:
    for width, phone in ((1440, False), (360, True)):
        await page.size(width, 740, phone=phone)
        try:
            await open_console(page, world, "tools?q=get_sun")
            await page.until("document.querySelectorAll('.row').length > 0", "the tool")
            parts = await page.run(f"[...{CELL}.childNodes].map(each => each.textContent)")
        finally:
            await page.size(1440, 900)
        assert parts[0] == "get_sun_times"
        assert parts[-1].startswith("Sunrise")


@pytest.mark.parametrize("age", ["59 min", "23 h", "365 d"])
async def test_the_figure_of_the_last_call_is_never_cut(page: Page, world: World, age: str) -> None:
    await open_console(page, world, "tools/travel/plan_trip")
    await page.until("document.querySelectorAll('.detail .figures .value').length === 5", "the figures")
    cut = "(all => all.filter(at => at.scrollWidth > at.parentElement.clientWidth - 28).map(at => at.innerText))"
    for width in (1440, 1000):
        await page.size(width, 900)
        await settled(page)
        await page.run(f"document.querySelector('.detail .figures > :last-child .value').firstChild.data = '{age}'")
        assert await page.run(f"{cut}([...document.querySelectorAll('.detail .figures .value')])") == []
    await page.size(1440, 900)


async def test_a_phone_shows_that_there_are_more_pages_and_on_which_side(page: Page, world: World) -> None:
    more = "[...document.querySelectorAll('.pages-bar .more')].map(each => each.className)"
    await page.size(360, 740, phone=True)
    try:
        await open_console(page, world, "overview")
        await page.until(f"({more}).join() === 'more after'", "the arrow to the right")
        for _ in range(4):
            await page.run("document.querySelector('.more.after')?.click()")
            await asyncio.sleep(0.3)
        await page.until(f"({more}).join() === 'more before'", "the arrow to the left, at the end")
    finally:
        await page.size(1440, 900)
    await page.until(f"({more}).length === 0", "no arrow where all pages are seen")
