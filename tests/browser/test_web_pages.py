"""Tests in a real Chromium that a web page can do nothing to a bus; and /docs works under its policy."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.browser.attempts import ATTEMPTS, REBINDING, script_of
from tests.browser.chromium import FOREIGN_HOST, Page, chromium_page
from tests.browser.recording import read_recorded, record, recorder
from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.testing import running_bus

pytestmark = pytest.mark.browser


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0) as bus:
        yield bus


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with chromium_page() as page:
        yield page


def _is_untouched(bus: Bus) -> bool:
    return not bus.list() and bus.core.takes_calls


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", FOREIGN_HOST])
async def test_no_attempt_of_a_page_of_another_server_succeeds(
    bus: Bus, page: Page, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with recorder() as own:
        await page.open(f"http://{host}:{own.port}/")
        for attempt, (_, seen) in ATTEMPTS.items():
            assert await page.run(script_of(attempt, f"http://{bus.http_address}")) == seen, attempt
            assert _is_untouched(bus), attempt
    await until(lambda: "path='/api/tools/clear'" in caplog.text, "the beacon to be refused")
    assert _is_untouched(bus)


async def test_a_page_whose_name_is_made_to_lead_to_the_bus_is_refused(bus: Bus, page: Page) -> None:
    assert bus.http_address is not None
    address = f"http://{FOREIGN_HOST}:{bus.http_address.rpartition(':')[2]}"
    await page.send("Page.setBypassCSP", enabled=True)  # of the refusal; a page that attacks has no policy
    await page.open(f"{address}/docs")
    assert "the Host header is" in await page.run("document.body.innerText")
    for attempt in REBINDING:
        await page.run(script_of(attempt, address))
        assert _is_untouched(bus), attempt
    assert "the Host header is" in await page.run(script_of("the list is read", address))


async def test_no_page_can_frame_the_documentation(bus: Bus, page: Page) -> None:
    async with recorder() as own:
        await page.open(f"http://localhost:{own.port}/")
        script = f"""new Promise(done => {{
            const frame = Object.assign(document.createElement('iframe'), {{src: 'http://{bus.http_address}/docs'}});
            frame.onload = done;
            document.body.append(frame);
        }}).then(() => 'loaded')"""
        assert await page.run(script) == "loaded"  # what the browser shows instead
        await until(lambda: any("frame-ancestors 'none'" in each for each in page.complaints), "the browser's refusal")


# Operation → the parameter of its path that has to be filled in, with a value.
OPERATIONS = {
    "tools-list_tools_api_tools_get": (),
    "tools-clear_api_tools_clear_post": (),
    "bus-administer_api_bus__name__post": ("name", "stats"),
}
_FOUND = """
    const found = async selector => {
        let element;
        while (!(element = document.querySelector(selector))) await new Promise(go => setTimeout(go, 20));
        return element;
    };
"""


async def test_the_documentation_works_under_its_policy(bus: Bus, page: Page) -> None:
    async def run(script: str) -> str:
        return str(await page.run(f"(async () => {{ {_FOUND} {script} }})()"))

    await page.open(f"http://{bus.http_address}/docs")
    for name, filled in OPERATIONS.items():
        operation = f"#operations-{name}"
        await run(f"(await found('{operation} .opblock-summary-control')).click()")
        await run(f"(await found('{operation} .try-out__btn')).click()")
        if filled:
            await run(f"(await found('{operation} tr[data-param-name={filled[0]}] input:enabled')).focus()")
            await page.send("Input.insertText", text=filled[1])
            await run("document.activeElement.blur()")
        await run(f"(await found('{operation} .execute')).click()")
        status = await run(f"return (await found('{operation} .live-responses-table tbody td')).innerText")
        assert status.startswith("200"), name
    assert page.complaints == []


async def test_the_recorded_requests_are_what_the_browser_sends() -> None:
    assert [each.essence() for each in await record()] == [each.essence() for each in read_recorded()]
