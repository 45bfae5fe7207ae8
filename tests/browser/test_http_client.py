"""The package `@toolbus/client/http` in a page of another server, in a real Chromium; `make clients` builds it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.browser.chromium import Page, chromium_page, find_chromium
from toolbus.functions.scope import ToolScope
from toolbus.sdk import Plugin
from toolbus.testing import running_bus

BUILT = Path(__file__).parents[2] / "clients" / "typescript" / "dist" / "esm"
PAGE = "<!doctype html><title>host</title>"


def _missing() -> str:
    if not (BUILT / "http.js").exists():
        return "make clients builds the package"
    try:
        find_chromium()
    except RuntimeError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(_missing()), reason=_missing())]


@asynccontextmanager
async def pages() -> AsyncIterator[str]:
    """Serves an empty page and the built modules; yields the origin."""

    async def index(request: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    app = web.Application()
    app.router.add_get("/", index)
    app.router.add_static("/esm", BUILT)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with chromium_page() as page:
        yield page


def in_page(address: str, body: str) -> str:
    """Returns a script that runs a body with a host of the bus; its value is what the body returns."""
    return f"""(async () => {{
        const {{ Host }} = await import("/esm/http.js");
        const host = new Host({{ address: "{address}" }});
        {body}
    }})()"""


async def brew(scope: ToolScope, cups: int) -> dict[str, int]:
    """Brews tea."""
    for cup in range(cups):
        scope.progress(cup + 1, total=cups, message="pouring")
    return {"cups": cups}


async def spill() -> None:
    """Spills it."""
    raise LookupError("no cup there")


async def test_a_page_of_an_allowed_origin_lists_calls_and_watches(page: Page) -> None:
    async with pages() as origin, running_bus(http="127.0.0.1:0", http_origins=(origin,)) as bus:
        address = f"http://{bus.http_address}"
        plugin = Plugin("tea", address=bus.grpc_addresses[0])
        plugin.add_tool(brew)
        plugin.add_tool(spill)
        async with plugin:
            await plugin.ready()
            await page.open(f"{origin}/")
            names = await page.run(in_page(address, "return (await host.list()).map((tool) => tool.name).sort();"))
            assert names == ["brew", "spill"]
            called = """
                const steps = [];
                const onProgress = (step) => steps.push(step.progress);
                const result = await host.call("brew", { cups: 3 }, { onProgress });
                return { output: result.output, steps };
            """
            assert await page.run(in_page(address, called)) == {"output": {"cups": 3}, "steps": [1, 2, 3]}
            failed = 'const { error } = await host.call("spill"); return [error.code, error.message];'
            code, message = await page.run(in_page(address, failed))
            assert (code, "no cup there" in message) == ("TOOL", True)
            refused = 'return (await host.call("brew", { cups: "many" })).error.code;'
            assert await page.run(in_page(address, refused)) == "INVALID_ARGUMENTS"
            exported = 'return (await host.export("openai")).tools.length;'
            assert await page.run(in_page(address, exported)) == 2
            watched = """
                const controller = new AbortController();
                for await (const change of host.watch({ signal: controller.signal })) {
                    controller.abort();
                    return change.added.length;
                }
            """
            assert await page.run(in_page(address, watched)) == 2


async def test_a_page_of_another_origin_gets_nothing(page: Page) -> None:
    async with pages() as origin, running_bus(http="127.0.0.1:0", http_origins=("http://127.0.0.1:1",)) as bus:
        await page.open(f"{origin}/")
        lists = 'try { await host.list(); return "listed"; } catch (error) { return error.name; }'
        assert await page.run(in_page(f"http://{bus.http_address}", lists)) != "listed"
