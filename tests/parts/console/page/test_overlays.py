"""Tests that the page of a tool shows the original beside the operator's overlay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import chromium_page
from toolbus.testing import running_bus

pytestmark = pytest.mark.console


async def test_a_tool_shows_what_its_author_declares_beside_the_overlay(tmp_path: Path) -> None:
    file = tmp_path / "overlays.toml"
    file.write_text('["local:search"]\nname = "find_notes"\ndescription = "Finds notes."\n')
    async with running_bus(http="127.0.0.1:0", overlays=file) as bus, chromium_page() as page:

        @bus.tool
        def search(text: str) -> str:
            """Searches everything <b>everywhere</b>."""
            return text

        (name,) = [each.tool.name for each in bus.list()]
        await page.open(f"http://{bus.http_address}/console#/tools/local/{name}")
        for text in ("Finds notes.", "the author declares", "<b>everywhere</b>"):
            await page.until(f"document.body?.innerText.includes({text!r})", repr(text))
