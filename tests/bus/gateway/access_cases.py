from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from toolbus.bus import Bus
from toolbus.protocol.tool import Limits
from toolbus.testing import running_bus

MOST = 20_000  # bytes of a body that the bus under test takes


CLEAR = b'{"source":"nobody"}'


LENGTH = f"Content-Length: {len(CLEAR)}"


HOST = "Host: localhost"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bus() -> AsyncIterator[Bus]:
    """One bus for all: it has to stand all of this."""
    async with running_bus(http="127.0.0.1:0", grace_seconds=0, limits=Limits(http_body_bytes=MOST)) as running:
        yield running
