"""Shares one demo world and one browser among the tests of a file: both take seconds to start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from tests.browser.chromium import Page, chromium_page
from tests.parts.console.page.world import World, demo_world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    async with demo_world() as world:
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page() -> AsyncIterator[Page]:
    async with chromium_page() as page:
        await page.size(1440, 900)
        await page.media()
        yield page


FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Notes what was measured, for the end of the run."""
    lines = request.config.stash.setdefault(FIGURES, [])
    return lambda what, value: lines.append(f"{what}: {value}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Shows the figures, which are not judged: how long something took depends on what else the machine does."""
    if lines := config.stash.get(FIGURES, []):
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)
