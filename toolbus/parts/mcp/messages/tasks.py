"""Writes tasks in the form of the extension `io.modelcontextprotocol/tasks` (SEP-2663)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from toolbus.parts.mcp.messages.eras import TASKS_EXTENSION

Json = dict[str, Any]

WORKING, INPUT_REQUIRED = "working", "input_required"
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
POLL_MS = 500

REQUIRED_CAPABILITIES: Mapping[str, Any] = {"extensions": {TASKS_EXTENSION: {}}}  # data of MISSING_CAPABILITY


def write_task(task_id: str, status: str, *, created: float, updated: float, ttl_ms: int, message: str = "") -> Json:
    """Returns the fields that each message about a task has.

    Args:
        created, updated: seconds since the epoch.
        ttl_ms: how long clients can read it, from its creation.
        message: about its state, for people; "" is left out.
    """
    task: Json = {
        "taskId": task_id,
        "status": status,
        "createdAt": _moment(created),
        "lastUpdatedAt": _moment(max(created, updated)),
        "ttlMs": ttl_ms,
        "pollIntervalMs": POLL_MS,
    }
    if message:
        task["statusMessage"] = message
    return task


def _moment(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
