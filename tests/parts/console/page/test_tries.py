"""Calling a tool from its page: what comes back is shown, and what would harm is asked about."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.browser.chromium import Page
from tests.parts.console.page.looking import open_console
from tests.parts.console.page.world import World, empty_world
from tests.support.waiting import within
from toolbus import Plugin
from toolbus.functions.reply import image
from toolbus.functions.scope import ToolScope

pytestmark = [pytest.mark.console, pytest.mark.asyncio(loop_scope="module")]

TEXT = 200_000  # characters of the long output
RESULT = "document.querySelector('[aria-label=Result]')"


def png(width: int, height: int, rows: int | None = None) -> bytes:
    """Returns a red picture, with all of its rows or only some."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    pixels = (b"\0" + b"\xff\0\0" * width) * (height if rows is None else rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


class Tools:
    """What the tools have done."""

    def __init__(self) -> None:
        self.removed = 0
        self.cancelled = asyncio.Event()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools() -> AsyncIterator[tuple[World, Tools]]:
    done = Tools()
    async with empty_world() as world:
        plugin = Plugin("tries", address=world.grpc)

        @plugin.tool
        def draw() -> object:
            return image(png(30, 20))

        @plugin.tool
        def draw_bomb() -> object:
            return image(png(20_000, 20_000, rows=0))

        @plugin.tool
        def write() -> str:
            return "x" * TEXT

        @plugin.tool(destructive=True)
        def remove_all() -> str:
            done.removed += 1
            return "removed"

        @plugin.tool
        async def wait(scope: ToolScope) -> str:
            scope.progress(1, total=4, message="a quarter")
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                done.cancelled.set()
                raise
            return "never"

        async with plugin:
            await plugin.ready()
            yield world, done


async def run_tool(page: Page, world: World, name: str) -> None:
    await open_console(page, world, f"tools/tries/{name}")
    await page.until("!!document.querySelector('form[aria-label=Arguments]')", "the form")
    await page.press("r")


async def test_a_picture_is_drawn_as_pixels(page: Page, tools: tuple[World, Tools]) -> None:
    await run_tool(page, tools[0], "draw")
    await page.until(f"{RESULT}?.querySelector('canvas.picture')?.width === 30", "the picture")
    assert await page.run(f"{RESULT}.querySelector('canvas').height") == 20
    assert await page.run("document.querySelectorAll('img').length") == 0
    assert page.complaints == []


async def test_a_picture_that_says_it_is_huge_is_decoded_only_when_asked_for(
    page: Page, tools: tuple[World, Tools]
) -> None:
    await run_tool(page, tools[0], "draw_bomb")
    await page.until(f"{RESULT}?.innerText.includes('20,000 × 20,000 pixels')", "its size")
    assert await page.run("document.querySelectorAll('canvas.picture').length") == 0
    await page.run(f"[...{RESULT}.querySelectorAll('button')].find(each => each.innerText === 'Show it').click()")
    await page.until("!!document.querySelector('canvas.picture') || document.body.innerText.includes('cannot be')")


async def test_a_long_output_is_cut_until_all_of_it_is_asked_for(page: Page, tools: tuple[World, Tools]) -> None:
    await run_tool(page, tools[0], "write")
    await page.until(f"!!{RESULT}?.querySelector('pre')", "the output")
    length = f"{RESULT}.querySelector('pre').textContent.length"
    assert await page.run(length) == 65_536
    await page.run(f"[...{RESULT}.querySelectorAll('button')].find(each => each.innerText === 'Show all').click()")
    await page.until(f"{length} === {TEXT}", "all of it")


async def test_a_destructive_tool_runs_only_once_its_name_was_typed(page: Page, tools: tuple[World, Tools]) -> None:
    world, done = tools
    await run_tool(page, world, "remove_all")
    await page.until("!!document.querySelector('dialog[open] input')", "the question")
    await page.type("remove")
    await page.press("Enter")
    await page.press("Escape")
    await page.until("!document.querySelector('dialog')", "no question")
    assert done.removed == 0
    await page.press("r")
    await page.until("!!document.querySelector('dialog[open] input')", "the question")
    await page.type("remove_all")
    await page.until("!document.querySelector('dialog button[type=submit]').disabled", "the button")
    await page.press("Enter")
    await page.until(f"{RESULT}?.innerText.includes('removed')", "the result")
    assert done.removed == 1


async def test_progress_is_shown_and_a_call_is_cancelled_down_to_the_plugin(
    page: Page, tools: tuple[World, Tools]
) -> None:
    world, done = tools
    await run_tool(page, world, "wait")
    await page.until("document.querySelector('.detail').innerText.includes('a quarter')", "the progress")
    await page.press("x")
    await within(done.cancelled.wait())
    await page.until("document.querySelector('.detail').innerText.includes('Cancelled')", "that it was cancelled")


async def test_what_was_typed_stays_when_the_tool_goes_and_comes_back_as_another(
    page: Page, tools: tuple[World, Tools]
) -> None:
    world, _ = tools

    first, second = (Plugin("again", address=world.grpc) for _ in range(2))

    @first.tool
    def say(text: str) -> str:
        return text

    @second.tool(name="say")
    def say_more(text: str, more: str = "") -> str:
        return text + more

    field = "document.querySelector('form[aria-label=Arguments] textarea')"
    async with first:
        await first.ready()
        await open_console(page, world, "tools/again/say")
        await page.until(f"!!{field}", "the form")
        await page.run(f"{field}.focus()")
        await page.type("as it was")
    await page.until("document.querySelector('.detail').innerText.includes('What you typed stays')", "that it went")
    assert await page.run(f"{field}.value") == "as it was"
    async with second:
        await second.ready()
        await page.until("document.querySelector('.detail').innerText.includes('The tool has changed')", "the change")
        await page.click(".note button")
        await page.until(
            "document.querySelector('form[aria-label=Arguments]').innerText.includes('more')", "the new form"
        )
        assert await page.run(f"{field}.value") == "as it was"
        await page.press("r")
        await page.until(f"{RESULT}?.innerText.includes('as it was')", "the result")
