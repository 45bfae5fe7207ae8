"""Tests what an operator does in the console: each act takes effect, says what went wrong, and asks first where it
harms."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.browser.chromium import Page
from tests.parts.console.page.looking import MAX_ROWS, drawn_rows, go, open_console, settled
from tests.parts.console.page.world import GUEST, USER, World
from tests.support.waiting import within

pytestmark = [pytest.mark.console, pytest.mark.asyncio(loop_scope="module")]


async def ask(world: World, name: str, **arguments: Any) -> Any:
    """Returns what a tool of the bus answers."""
    return (await world.post(f"/api/bus/{name}", arguments))["output"]


async def press_button(page: Page, text: str, within: str = "main") -> None:
    """Presses the first button with a text, as soon as it is there."""
    button = f"[...document.querySelectorAll({json.dumps(within + ' button')})].find(each => " + (
        f"each.textContent.trim() === {json.dumps(text)} && !each.disabled)"
    )
    await page.until(f"!!{button}", f"the button {text!r}")
    await page.run(f"{button}.click()")


async def says(page: Page, text: str, selector: str = "main") -> None:
    """Waits until a text is on the page."""
    seen = f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})"
    await page.until(f"!!{seen}", f"{text!r} in {selector}")


async def test_a_rule_of_users_is_removed_and_brought_back_by_a_key(page: Page, world: World) -> None:
    await open_console(page, world, "permissions")
    await press_button(page, "Remove", within="tr:has(td)")
    await says(page, "The rule of tool charge_card is removed.")
    assert "charge_card" not in (await ask(world, "permissions"))["tools"]
    await page.press("u")
    await page.until("!document.querySelector('.note.ok')", "the change to be undone")
    assert (await ask(world, "permissions"))["tools"]["charge_card"] == ["u-12", "u-7"]


async def test_a_new_rule_takes_effect_and_one_that_is_wrong_says_why_beside_the_form(page: Page, world: World) -> None:
    await open_console(page, world, "permissions")
    await page.until("!!document.querySelector('#rule-name')")
    await page.run("document.querySelector('#rule-name').focus()")
    await page.type("plan_trip")
    await page.press("Tab")
    await page.type("u-17, u-3")
    await page.press("Enter")
    await says(page, "u-17, u-3 may call tool plan_trip.")
    assert (await ask(world, "permissions"))["tools"]["plan_trip"] == ["u-17", "u-3"]
    await press_button(page, "Undo")
    await page.until("!document.querySelector('.note.ok')")
    assert "plan_trip" not in (await ask(world, "permissions"))["tools"]
    await page.run("document.querySelector('#rule-name').focus()")
    await page.type("plan_trip")
    await page.press("Tab")
    await page.type("x" * 300)
    await page.press("Enter")
    await page.until("!!document.querySelector('form .error')", "the reason beside the form")
    assert page.dialogs == []


async def test_a_tool_for_certain_users_that_nobody_has_called_is_listed(page: Page, world: World) -> None:
    await world.post("/api/bus/permit", {"kind": "tools", "name": "merge_pallet", "users": ["u-12"]})
    try:
        await open_console(page, world, "tools?q=merge_pallet")
        await says(page, "1 tool")
        await page.press("Enter")
        await says(page, "Try it", ".detail")
    finally:
        await world.post("/api/bus/permit", {"kind": "tools", "name": "merge_pallet", "users": None})


async def test_the_keys_of_a_bus_without_keys_are_shown_as_none_and_no_call_fails(page: Page, world: World) -> None:
    await open_console(page, world, "permissions?tab=keys")
    await says(page, "toolbus keys init")
    keys = [
        each for each in await ask(world, "calls", limit=1000) if each["name"] in ("toolbus:keys", "toolbus:this_bus")
    ]
    assert keys == []  # who looks leaves no records


async def test_fields_that_are_filled_within_one_frame_all_keep_what_they_got(page: Page, world: World) -> None:
    """As a browser fills in a form."""
    await open_console(page, world, "permissions")
    await page.until("!!document.querySelector('#rule-name')")
    fields = "[...document.querySelectorAll('#rule-name, #rule-users')]"
    fill = "each => { each.value = 'filled'; each.dispatchEvent(new Event('input', {bubbles: true})); }"
    await page.run(f"{fields}.forEach({fill})")
    await settled(page)
    assert await page.run(f"{fields}.map(each => each.value)") == ["filled", "filled"]


async def test_a_source_loses_its_tools_only_after_its_name_was_typed(page: Page, world: World) -> None:
    await open_console(page, world, "permissions?tab=sources&q=texts")
    await press_button(page, "Revoke …")
    await page.until("!!document.querySelector('dialog[open] button.danger:disabled')")
    await page.type("text")
    assert await page.run("document.querySelector('dialog button.danger').disabled")
    await page.press("Escape")
    await page.until("!document.querySelector('dialog[open]')")
    assert "texts" not in (await ask(world, "permissions"))["silenced"]
    await press_button(page, "Revoke …")
    await page.until("!!document.querySelector('dialog[open]')")
    await page.type("texts")
    await page.until("!document.querySelector('dialog button.danger').disabled", "the name to be the right one")
    await page.press("Enter")
    await says(page, "no", "main tr td:nth-child(2)")
    assert "texts" in (await ask(world, "permissions"))["silenced"]
    await press_button(page, "Grant")
    await says(page, "yes", "main tr td:nth-child(2)")
    assert "texts" not in (await ask(world, "permissions"))["silenced"]


async def test_a_question_that_was_closed_is_asked_again_at_once(page: Page, world: World) -> None:
    await open_console(page, world, "permissions?tab=sources&q=texts")
    await press_button(page, "Revoke …")
    await page.until("!!document.querySelector('dialog[open]')")
    again = "[...document.querySelectorAll('main button')].find(each => each.textContent.trim() === 'Revoke …').click()"
    closed = "new Promise(done => old.addEventListener('close', () => setTimeout(done)))"
    await page.run(
        f"(old => {{ const heard = {closed}; old.close(); {again}; return heard; }})(document.querySelector('dialog'))"
    )
    await page.until("!!document.querySelector('dialog[open] button.danger:disabled')")
    await page.press("Escape")


async def test_the_output_of_a_plugin_is_followed_as_plain_text_in_few_rows(page: Page, world: World) -> None:
    plugins = (await ask(world, "plugin_logs"))["plugins"]
    billing = next(each for each in plugins if each["plugin"] == "billing")
    await open_console(page, world, f"logs/{billing['source']}/billing")
    await page.until("document.querySelectorAll('.log .line').length > 0", "the first lines")
    for amount in range(60):
        await world.assistant.call("charge_card", {"customer": "C-1", "amount": amount}, context=GUEST)
    await says(page, "charging 59.00 EUR", ".log")
    assert await drawn_rows(page) <= MAX_ROWS + 20  # and a row for each plugin, and each source without output
    await page.run("(() => { document.querySelector('.log').scrollTop = 0; })()")
    await says(page, "out of memory while drawing", ".log")
    assert "\x1b" not in await page.run("document.querySelector('.log').innerText")
    assert "[31m" not in await page.run("document.querySelector('.log').innerText")


async def test_a_running_task_is_cancelled(page: Page, world: World) -> None:
    begun = await world.assistant.call(
        "yearly_report", {"year": 2023, "seconds": 600}, context=USER, background_after=0.001
    )
    task_id = begun.unwrap()["task_id"]
    await open_console(page, world, f"tasks/{task_id}")
    await press_button(page, "Cancel", within=".detail")
    await page.until("document.querySelector('.detail .head .chip')?.textContent === 'failed'", "the task to end")
    await says(page, "cancelled", ".detail .error")


async def test_a_running_call_is_cancelled_after_the_name_of_its_tool_was_typed(page: Page, world: World) -> None:
    calls = world.assistant.call("yearly_report", {"year": 2022, "seconds": 600}, context=USER, timeout=300)
    calling = asyncio.create_task(calls)
    try:
        await open_console(page, world, "calls?status=running")
        await page.until("document.querySelectorAll('.row').length === 2", "the call beside the task")
        own = (await ask(world, "digest"))["running"][-1]["id"]
        await go(page, f"calls?status=running&q={own}")
        await page.until("document.querySelector('.row')?.innerText.includes('yearly_report')", "the call")
        await page.press("Enter")
        await says(page, "Cancel …", ".detail")
        await settled(page)
        await page.press("x")
        await page.until("!!document.querySelector('dialog[open] input')", "the question")
        await page.type("yearly_report")
        await page.until("!document.querySelector('dialog button.danger').disabled", "the name to be the right one")
        await page.press("Enter")
        error = (await within(calling)).error
        assert error is not None
        assert error.message == "an operator cancelled the call"
        await says(page, "an operator cancelled the call", ".detail .error")
        assert await page.run("![...document.querySelectorAll('button')].some(each => each.textContent === 'Cancel …')")
    finally:
        calling.cancel()


async def test_a_log_level_is_changed_and_put_back_and_a_wrong_logger_says_why(page: Page, world: World) -> None:
    await open_console(page, world, "bus")
    await page.until("!!document.querySelector('#level-logger')")
    field = "document.querySelector('#level-logger')"
    await page.run(f"{field}.focus(); {field}.select()")
    await page.type("toolbus.tasks")
    await press_button(page, "Set")
    await says(page, "Put back")
    assert (await ask(world, "log_level"))["levels"]["toolbus.tasks"] == "debug"
    await press_button(page, "Put back")
    await page.until("![...document.querySelectorAll('button')].some(each => each.textContent === 'Put back')")
    assert (await ask(world, "log_level"))["changed"] == {}
    await page.run(f"{field}.focus(); {field}.select()")
    await page.type("elsewhere")
    await press_button(page, "Set")
    await says(page, "elsewhere", "form .error")


async def test_a_paused_list_of_calls_stands_still_and_says_how_many_are_new(page: Page, world: World) -> None:
    await open_console(page, world, "calls?tool=get_sun_times")
    await page.until("document.querySelectorAll('.row').length > 3")
    await page.press("p")
    before = await page.run("document.querySelector('.rows').innerText")
    await world.assistant.call("get_sun_times", {"city": "Rome", "date": "2024-06-21"}, context=USER)
    await page.until(
        "[...document.querySelectorAll('main button')].some(each => /Go on\\s*\\+[1-9]/.test(each.textContent))",
        "the number of new calls",
    )
    assert await page.run("document.querySelector('.rows').innerText") == before
    await page.press("p")
    await page.until(f"document.querySelector('.rows').innerText !== {json.dumps(before)}", "the new call")
