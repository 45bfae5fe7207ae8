"""The fixtures of the contract suite: a bus on a unix socket, each way of offering a tool, each way of calling one.

The tests of a file share one bus, on one event loop: what a test offered is gone before the next begins.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.contract.callers import caller
from tests.contract.offers import kind, offer
from tests.support.waiting import until
from toolbus.bus import Bus
from toolbus.protocol.tool import Limits
from toolbus.testing import running_bus

__all__ = ["bus", "caller", "kind", "offer"]

HERE = Path(__file__).parent
RESULT_BYTES = 200_000

# The callers that kinds which are slow to offer are paired with: the program, as in most tests, and one other.
CALLERS = {"rest": {"", "http"}, "dropin": {"", "host"}, "lane": {"", "lane"}}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Pairs some kinds with one caller only: each is also met by every other kind of caller or of tool."""
    own = [item for item in items if HERE in item.path.parents]  # the hook is handed everybody's
    redundant = {item for item in own if _speaks(item, "caller") not in _callers(item)}
    config.hook.pytest_deselected(items=list(redundant))
    items[:] = [item for item in items if item not in redundant]


def _callers(item: pytest.Item) -> set[str]:
    """Returns the callers that an item's kind of tool is paired with, its own among them where there is no rule."""
    return CALLERS.get(_speaks(item, "kind"), {_speaks(item, "caller")})


def _speaks(item: pytest.Item, side: str) -> str:
    parameters: dict[str, str] = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get(side, "")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_bus() -> AsyncIterator[Bus]:
    """A bus that takes small results only, and that knows at once that a name is unknown (no grace period)."""
    limits = Limits(result_bytes=RESULT_BYTES)
    async with running_bus(unix=True, http="127.0.0.1:0", limits=limits, grace_seconds=0.0) as bus:
        yield bus


@pytest_asyncio.fixture(loop_scope="module")
async def bus(shared_bus: Bus) -> AsyncIterator[Bus]:
    """The bus, without tools, sessions and calls before and after each test."""
    yield shared_bus
    core = shared_bus.core
    await until(lambda: not core.sessions.presence.sessions, "all sessions to end")
    assert (shared_bus.list(), core.calls.dispatcher.in_flight.active) == ([], 0)
