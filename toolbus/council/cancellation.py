"""Whether a CancelledError is meant for us: what a tool or a model waited for may have broken off by itself."""

from __future__ import annotations

import asyncio


def being_cancelled() -> bool:
    """Tells whether somebody cancels this task, and not just what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
