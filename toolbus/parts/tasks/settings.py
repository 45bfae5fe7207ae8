"""Declares the setting of a bus for tasks."""

from __future__ import annotations

from dataclasses import dataclass

from toolbus.common.setting import NUMBER, CheckedRecord, setting, within

MAX_SOFT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class TaskSettings(CheckedRecord):
    """When a call of a `ToolRegistry` becomes a task."""

    background_after_seconds: float = setting(
        10.0,
        NUMBER,
        "how long a call of a `ToolRegistry(bus=…)` waits before it becomes a [task](../start/tasks.md); 0 to 3600",
        check=within(0, MAX_SOFT_SECONDS, "seconds"),
    )
