"""Offers the tools by which models come back to their tasks, and persists tasks in the data directory."""

from __future__ import annotations

from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.core import Core
from toolbus.bus.room import Room
from toolbus.bus.tasks.task_tools import TaskTools
from toolbus.functions.tool_spec import spec_of

TASKS_FILE = "tasks.db"  # in the data directory


class TasksRoom(Room):
    """The tasks of one bus as operators and models reach them."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        for method in TaskTools(core.tasks).tools():
            core.local.offer(BUS_SOURCE, spec_of(method), qualified=True)
            if "tasks" in core.config.offered:
                core.local.offer(f"{BUS_SOURCE}.tasks", spec_of(method))

    async def open(self) -> None:
        """Restores the tasks of the data directory and persists those to come."""
        if self.core.config.data_dir is not None:
            self.core.tasks.keep_in(self.core.config.data_dir / TASKS_FILE)

    async def stop(self) -> None:
        """Ends every task; clients that wait for one are answered."""
        self.core.tasks.close()
