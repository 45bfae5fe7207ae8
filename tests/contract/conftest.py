"""The fixtures of the contract suite: a bus on a unix socket, each way of offering a tool, each way of calling one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.callers import caller
from tests.contract.offers import kind, offer
from toolbus.bus import Bus
from toolbus.testing import running_bus
from toolbus.tool import Limits

__all__ = ["bus", "caller", "kind", "offer"]

RESULT_BYTES = 200_000


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    """A bus that takes small results only, and that knows at once that a name is unknown (no grace period)."""
    async with running_bus(unix=True, limits=Limits(result_bytes=RESULT_BYTES), grace_seconds=0.0) as bus:
        yield bus
