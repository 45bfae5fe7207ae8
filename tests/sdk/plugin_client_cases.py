from __future__ import annotations

import asyncio
import threading

from tests.sdk.played_bus import SECONDS


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, SECONDS)
