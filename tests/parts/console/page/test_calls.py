"""Calls in the console: those that failed say why and what then, those that made others are drawn to scale."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.browser.chromium import Page
from tests.parts.console.page.looking import open_console
from tests.parts.console.page.world import World
from tests.support.waiting import WAIT_SECONDS

pytestmark = [pytest.mark.console, pytest.mark.asyncio(loop_scope="module")]

# The bars of a waterfall: where they begin and how wide they are, in hundredths of the whole.
_BARS = """[...document.querySelectorAll('.waterfall .span')].map(span => {
    const {left, width} = span.querySelector('.piece').style;
    return {id: span.dataset.id, left: parseFloat(left), width: parseFloat(width)};
})"""


async def calls_of(world: World, **query: str) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(
        base_url=f"http://{world.http}", trust_env=False, verify=False, timeout=WAIT_SECONDS
    ) as client:
        answer = await client.get("/api/calls", params={"limit": "200", **query})
    found: list[dict[str, Any]] = answer.json()["calls"]
    return found


@pytest.mark.parametrize("tool", ["render_invoice", "export_ledger", "print_slip", "find_the_lost_parcel"])
async def test_a_failed_call_says_why_how_far_it_came_and_whether_to_call_again(
    page: Page, world: World, tool: str
) -> None:
    call = next(each for each in await calls_of(world, name=tool) if each["outcome"] != "OK")
    await open_console(page, world, f"calls/{call['id'] or 'n' + str(call['number'])}")  # refused: it has no id
    await page.until("!!document.querySelector('.detail .error')", "the reason")
    text = await page.run("document.querySelector('.detail').innerText")
    failure = call["failure"]
    assert failure["message"] in text
    assert "Stage" in text
    unseen = failure["stage"].upper() == "NOT_DISPATCHED"
    assert ("yes, that is safe" if failure["retry_safe"] else "not as it is" if unseen else "with care") in text
    if failure["limit"]:
        assert f"{failure['limit']['name']} = {failure['limit']['value']}" in text


async def test_a_kind_of_error_says_how_far_its_newest_call_came_and_whether_to_call_again(
    page: Page, world: World
) -> None:
    await open_console(page, world, "errors/export_ledger/DEADLINE_EXCEEDED/billing")
    await page.until("!!document.querySelector('.detail .facts')", "the newest call")
    text = await page.run("document.querySelector('.detail').innerText")
    assert "dispatched: it may have run" in text
    assert "yes, that is safe" in text  # it only reads


async def test_a_source_that_is_offline_says_since_when_and_how_long_its_tools_are_kept(
    page: Page, world: World
) -> None:
    await open_console(page, world, "sources/gate-scanner")
    text = await page.run("document.querySelector('.detail').innerText")
    assert "offline since 20" in text
    assert "keep their places until 20" in text


async def test_calls_three_deep_are_drawn_to_scale(page: Page, world: World) -> None:
    calls = {each["id"]: each for each in await calls_of(world)}
    root = next(each for each in calls.values() if each["name"] == "plan_trip")
    family = {root["id"]}
    while grown := {call["id"] for call in calls.values() if call.get("parent") in family} - family:
        family |= grown
    assert len(family) == 8
    await open_console(page, world, f"calls/{root['id']}")
    await page.until(f"document.querySelectorAll('.waterfall .span').length === {len(family)}", "the waterfall")
    began = min(calls[each]["started"] for each in family)
    length = max(calls[each]["ended"] for each in family) - began
    for bar in await page.run(_BARS):
        call = calls[bar["id"]]
        assert bar["left"] / 100 * length == pytest.approx(call["started"] - began, abs=0.001)
        assert bar["width"] / 100 * length == pytest.approx(call["ended"] - call["started"], abs=0.001)
