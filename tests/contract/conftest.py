"""The fixtures of the contract suite: a bus on a unix socket, each way of offering a tool, each way of calling one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.callers import caller
from tests.contract.offers import kind, offer
from toolbus.bus import Bus
from toolbus.testing import running_bus
from toolbus.tool import Limits

__all__ = ["bus", "caller", "kind", "offer"]

HERE = Path(__file__).parent
RESULT_BYTES = 200_000
OVER_HTTP = {"rest", "http"}  # the ways of offering and of calling that need the bus's HTTP

# The callers that kinds which are slow to offer are paired with: the program, as in most tests, and one other.
CALLERS = {"rest": {"", "http"}, "dropin": {"", "host"}}


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


@pytest.fixture
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    """A bus that takes small results only, and that knows at once that a name is unknown (no grace period).

    It serves HTTP only where a test needs it: starting and stopping a server takes forty times as long as the rest.
    """
    spoken = {_speaks(request.node, "kind"), _speaks(request.node, "caller")}
    http = "127.0.0.1:0" if spoken & OVER_HTTP else "off"
    limits = Limits(result_bytes=RESULT_BYTES)
    async with running_bus(unix=True, http=http, limits=limits, grace_seconds=0.0) as bus:
        yield bus
