"""Looks at the console in Chromium: opens its pages, and finds what a person could not read, see or reach."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.browser.chromium import Page
from tests.parts.console.page.world import World

# Route → a text of the page that stands there once its data have come.
PAGES = ("overview", "sources", "tools", "calls", "errors", "logs", "permissions", "tasks", "council", "bus")
MAX_ROWS = 60
MIN_CONTRAST = 4.5  # WCAG 2.1, AA

# Every text that is seen, with the contrast of its colour to what is painted below it; the worst first.
_CONTRASTS = """(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
    const parsed = new Map();
    const rgba = text => {
        if (!parsed.has(text)) {
            canvas.clearRect(0, 0, 1, 1);
            canvas.fillStyle = text;
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
            parsed.set(text, [r, g, b, a / 255]);
        }
        return parsed.get(text);
    };
    const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
    const ground = element => {
        const layers = [];
        for (let at = element; at; at = at.parentElement) {
            const color = rgba(getComputedStyle(at).backgroundColor);
            if (color[3] > 0) layers.push(color);
            if (color[3] === 1) break;
        }
        const dark = matchMedia('(prefers-color-scheme: dark)').matches;
        return layers.reduceRight((below, top) => over(top, below), dark ? [18, 18, 18, 1] : [255, 255, 255, 1]);
    };
    const light = color => {
        const parts = color.slice(0, 3).map(each => each / 255);
        const [r, g, b] = parts.map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
        if (!text || element.closest('noscript, :disabled, .hush') || !element.checkVisibility()) continue;
        const below = ground(element), above = over(rgba(getComputedStyle(element).color), below);
        const [a, b] = [light(above), light(below)].sort((x, y) => y - x);
        found.push([(a + 0.05) / (b + 0.05), text.slice(0, 60), element.className, above.join(), below.join()]);
    }
    return found.sort((x, y) => x[0] - y[0]);
})()"""
# What has the focus, and whether a person sees that.
_FOCUS = """(() => {
    const at = document.activeElement, style = getComputedStyle(at);
    const outlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1;
    const label = at.getAttribute('aria-label') || at.innerText || '';
    const name = at.tagName + '.' + at.className + ' ' + label.slice(0, 40);
    return [name, at === document.body || outlined];
})()"""


async def open_console(page: Page, world: World, route: str = "sources") -> None:
    """Opens a route in a fresh document, and waits until it is live and drawn."""
    await page.open("about:blank")
    for seen in (page.complaints, page.requests, page.dialogs, page.loading):
        seen.clear()
    await page.open(f"{world.page}#/{route}")
    await page.until("!!document.querySelector('.top .state.ok')", "the page to be live")
    await settled(page)


async def go(page: Page, route: str) -> None:
    """Goes to another route of the open console."""
    await page.run(f"void (location.hash = '#/{route}')")
    await settled(page)


async def settled(page: Page) -> None:
    """Waits until the page has drawn what it asked for; 1 s at most, since it follows logs by answers that wait."""
    end = time.monotonic() + 1
    for _ in range(2):  # what came may make it ask for more
        await page.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 20)))")
        while page.loading and time.monotonic() < end:
            await asyncio.sleep(0.01)
    await page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


async def too_pale(page: Page) -> list[Any]:
    """Returns the texts whose contrast is below `MIN_CONTRAST`."""
    return [each for each in await page.run(_CONTRASTS) if each[0] < MIN_CONTRAST]


async def unseen_focus(page: Page, stops: int = 40) -> list[str]:
    """Goes through the page by Tab; returns what does not show that it has the focus."""
    unseen = []
    for _ in range(stops):
        await page.press("Tab")
        name, seen = await page.run(_FOCUS)
        if not seen and name not in unseen:
            unseen.append(name)
    return unseen


async def drawn_rows(page: Page) -> int:
    """Returns how many rows of lists are in the document."""
    return int(await page.run("document.querySelectorAll('.row, .log .line, .waterfall .span').length"))


def foreign(page: Page, world: World) -> list[str]:
    """Returns the addresses that it asked for and that are not the bus's."""
    own = (f"http://{world.http}/", "about:", "data:")
    return [url for url in page.requests if not url.startswith(own)]
