"""Tells whether a CancelledError is meant for the current task, or comes from what the task waits for."""

from __future__ import annotations

import asyncio


def is_being_cancelled() -> bool:
    """Tells whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
