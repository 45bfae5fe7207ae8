"""Offers the tools with which models use their tasks, and persists tasks in the data directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from toolbus.bus.core import Core, Room
from toolbus.bus.tasks.task_tools import TaskTools


class TasksRoom(Room):
    """The tasks of one bus, for operators and models."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._tools = TaskTools(core.tasks).tools()

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the tools for tasks."""
        return self._tools

    def offered(self, group: str) -> Iterable[Callable[..., Any]]:
        """Returns the tools for tasks, for models too."""
        return self._tools if group == "tasks" else []

    async def open(self) -> None:
        """Restores the stored tasks, and persists those to come."""
        if self.core.store.persistent:
            self.core.tasks.persist_in(self.core.store)

    async def stop(self) -> None:
        """Ends every task; clients that wait for one are answered."""
        self.core.tasks.close()
