"""Tests how the page begins where the bus asks who looks: the way to a code, its exchange, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from aiohttp import web

from tests.browser.chromium import Page, chromium_page
from tests.parts.console.page.vendor import PAGE
from tests.support.waiting import until

pytestmark = pytest.mark.console

TYPES = {".mjs": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
REFUSAL = "'ann' may not read calls: add calls to administer in keys.toml"


class Mute:
    """A server that refuses the first stream and says nothing in those after it."""

    def __init__(self) -> None:
        self.asked = 0
        self.open = 0

    def is_open(self, asked: int) -> bool:
        """Tells whether one of so many streams is open."""
        return self.asked >= asked and self.open > 0

    async def me(self, _: web.Request) -> web.Response:
        return web.json_response({"identity": "", "administer": ["*"], "version": "", "bus_id": "", "home": "here"})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.asked == 1:
            return web.json_response({"detail": "not now"}, status=503)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.open += 1
        try:
            while True:
                await answer.write(b": nothing\n\n")
                await asyncio.sleep(0.02)
        finally:
            self.open -= 1


class Doors:
    """A server with the page's files that lets in a browser with the code, and none to the stream."""

    def __init__(self) -> None:
        self.codes: list[str] = []  # that came
        self.is_open = False

    async def login(self, request: web.Request) -> web.Response:
        self.codes.append((await request.json())["code"])
        self.is_open = self.is_open or self.codes[-1] == "right"
        return web.json_response({"detail": "this code is unknown"}, status=200 if self.is_open else 401)

    async def me(self, _: web.Request) -> web.Response:
        if not self.is_open:
            return web.json_response({"detail": "no key proves who asks"}, status=401)
        return web.json_response({"identity": "ann", "administer": [], "version": "", "bus_id": "", "home": "here"})

    async def refuse(self, _: web.Request) -> web.Response:
        return web.json_response({"detail": REFUSAL}, status=403)


@asynccontextmanager
async def doors() -> AsyncIterator[tuple[Doors, str]]:
    """Yields a server and the address of its page."""
    doors = Doors()
    app = web.Application()
    app.router.add_post("/api/console/login", doors.login)
    app.router.add_get("/api/console/me", doors.me)
    app.router.add_route("*", "/api/{path:.*}", doors.refuse)
    async with served(app) as url:
        yield doors, url


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Serves an application and the page's files; yields the address of the page."""
    app.router.add_get("/console", page_file)
    app.router.add_get("/console/{name:.+}", page_file)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/console"
    finally:
        await runner.cleanup()


async def page_file(request: web.Request) -> web.Response:
    path = PAGE / (request.match_info.get("name") or "index.html")
    return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix])


async def says(page: Page, text: str) -> None:
    """Waits until the page says something."""
    await page.until(f"document.body?.innerText.includes({text!r})", repr(text))


async def test_the_page_tells_the_way_to_a_code_and_takes_one_out_of_its_address() -> None:
    async with doors() as (served, url), chromium_page() as page:
        await page.open(url)
        await says(page, "no key proves who asks")
        await says(page, f"toolbus console --bus {url.removesuffix('/console')} --credential FILE")
        await page.run("void (location.hash = '#code=wrong')")
        await says(page, "This code was used already, or is older than a minute.")
        assert served.codes == ["wrong"]
        await page.run("void (location.hash = '#code=right')")
        await says(page, "here")  # the name of the bus's machine
        await says(page, "Sources")
        assert "There is no page" not in await page.run("document.body.innerText")
        assert served.codes == ["wrong", "right"]
        assert "code" not in await page.run("location.href")
        await says(page, REFUSAL)


async def test_a_tab_that_is_seen_again_while_the_bus_is_silent_has_one_stream() -> None:
    mute = Mute()
    app = web.Application()
    app.router.add_get("/api/console/me", mute.me)
    app.router.add_get("/api/console/stream", mute.stream)
    async with served(app) as url, chromium_page() as page:
        await page.open(url)
        for asked in (2, 3, 4):
            await until(partial(mute.is_open, asked))
            await page.run("void dispatchEvent(new Event('visibilitychange'))")
        await until(partial(mute.is_open, 5))
        await until(lambda: mute.open == 1)
