"""Waits for the first of several things, and tells whether a CancelledError is meant for the current task or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


def is_being_cancelled() -> bool:
    """Tells whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def wait_first(*awaitables: Awaitable[object]) -> None:
    """Waits for the first of several; cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
