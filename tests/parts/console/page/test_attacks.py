"""Tests that a plugin can do nothing to who looks at it in a browser, where each of its texts is an attack."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.browser.chromium import Page
from tests.parts.console.page.attacks import attacked_world
from tests.parts.console.page.looking import PAGES, foreign, go, open_console, settled
from tests.parts.console.page.world import World

pytestmark = [pytest.mark.console, pytest.mark.asyncio(loop_scope="module")]

# Elements and attributes that no text may become; the page's own script and style are in its head.
_MADE = """[...document.body.querySelectorAll(
    'img, script, iframe, object, embed, link, style, base, meta, form[action], [srcdoc], [onerror], [onload]'
)].map(each => each.outerHTML.slice(0, 200))"""
_FOREIGN_LINKS = """[...document.querySelectorAll('[href], [src]')].map(each => each.href || each.src)
    .filter(address => !address.startsWith(location.origin + '/'))"""
_CONTROLS = r"""(() => {
    const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        if (/[\x00-\x08\x0b-\x1f\x7f-\x9f]/.test(walker.currentNode.data)) {
            found.push(walker.currentNode.parentElement.outerHTML.slice(0, 120));
        }
    }
    return found;
})()"""
# Texts whose reordering reaches beyond themselves.
_REORDERING = r"""(() => {
    const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        if (!/[\u202a-\u202e\u2066-\u2069]/.test(walker.currentNode.data)) continue;
        let at = walker.currentNode.parentElement;
        const closed = element => {
            const style = getComputedStyle(element);
            return style.display !== 'inline' || /isolate|plaintext/.test(style.unicodeBidi);
        };
        if (!closed(at)) found.push(at.outerHTML.slice(0, 120));
    }
    return found;
})()"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with attacked_world(tmp_path_factory.mktemp("attacked")) as world:
        yield world


async def assert_harmless(page: Page, world: World) -> None:
    assert page.dialogs == []
    assert foreign(page, world) == []
    assert page.complaints == []  # reports of the policy among them
    assert await page.run("typeof globalThis.broken") == "undefined"
    assert await page.run(_MADE) == []
    assert await page.run(_FOREIGN_LINKS) == []
    assert await page.run(_CONTROLS) == []
    assert await page.run(_REORDERING) == []
    assert await page.run("Object.getPrototypeOf({}) === Object.prototype && ({}).constructor === Object")


@pytest.mark.parametrize("route", PAGES)
async def test_a_page_shows_the_texts_of_an_attacker_as_texts(page: Page, attacked: World, route: str) -> None:
    await open_console(page, attacked, route)
    await assert_harmless(page, attacked)
    rows = await page.run("document.querySelectorAll('.row').length")
    for _ in range(min(rows, 16)):
        await page.press("j", "Enter")
        await settled(page)
        await assert_harmless(page, attacked)
        await page.press("Escape")
    await go(page, route)
    await page.press("/")
    await page.type("<img src=x onerror=alert(1)>")
    await settled(page)
    await assert_harmless(page, attacked)


async def test_an_address_with_markup_is_text(page: Page, attacked: World) -> None:
    attack = "%3Cimg%20src=x%20onerror=alert(1)%3E"
    await open_console(page, attacked)
    for route in (*PAGES, attack, "__proto__", "constructor"):
        await go(page, f"{route}/{attack}/{attack}?status={attack}&{attack}=__proto__")
        await assert_harmless(page, attacked)
