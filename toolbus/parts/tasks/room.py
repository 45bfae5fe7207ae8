"""Offers the tools with which models use their tasks, and persists tasks in the data directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from toolbus.bus.core import Core, Room
from toolbus.bus.storage.store import WriteFailed
from toolbus.errors import SetupError
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.tasks.settings import TaskSettings
from toolbus.parts.tasks.task import home_of, shown_owner
from toolbus.parts.tasks.task_manager import TaskManager
from toolbus.parts.tasks.task_tools import TaskTools

log = logging.getLogger("toolbus.tasks")

AGAIN_SECONDS = 2.0  # between attempts to restore tasks from a database that is away


class TasksRoom(Room):
    """The tasks of one bus, for operators and models; without it callers wait to the end."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.manager = TaskManager(core.config.part(TaskSettings).background_after_seconds)
        self.manager.home = home_of(core.config.bus_id)
        self._tools = TaskTools(self.manager).tools()
        self._restoring: asyncio.Task[None] | None = None  # None unless the database was away at the start
        core.calls.dispatcher.seams.background = self.manager

    def tools(self) -> Iterable[Callable[..., Any]]:
        return [*self._tools, self.all_tasks]

    def offered(self, group: str) -> Iterable[Callable[..., Any]]:
        """Returns the tools for tasks, for models too."""
        return self._tools if group == "tasks" else []

    def provides(self) -> Iterable[object]:
        return [self.manager]

    def routes(self) -> Iterable[str]:
        """Names the endpoints of tasks."""
        return ["toolbus.parts.tasks.task_routes:router"]

    async def open(self) -> None:
        """Restores the stored tasks, where a shared database is away once it is back, and persists those to come."""
        if self.core.program.store.persistent:
            try:
                self.manager.persist_in(self.core.program.store)
            except WriteFailed as error:
                log.warning("tasks of earlier runs come back with the database: %s", error)
                self._restoring = asyncio.get_running_loop().create_task(self._restore(), name="toolbus tasks")

    async def _restore(self) -> None:
        logged = ""
        while True:
            await asyncio.sleep(AGAIN_SECONDS)
            try:
                await asyncio.to_thread(self.manager.persist_in, self.core.program.store)
                return
            except WriteFailed:  # it is still away
                pass
            except SetupError as error:  # it is damaged, or went away while it was read, which may pass
                if logged != (logged := str(error)):
                    log.error("tasks are neither restored nor persisted until this is repaired: %s", error)

    async def stop(self) -> None:
        """Ends every task; clients that wait for one are answered."""
        if self._restoring is not None:
            self._restoring.cancel()
        self.manager.close()

    @llm_tool(description="Lists the background tasks of all users and programs, newest first, without contents.")
    async def all_tasks(self, task_id: str = "", limit: int = 200) -> dict[str, Any]:
        """Lists the tasks of all owners, with owner and state; only the owner sees errors and progress.

        Args:
            task_id: only this one.
            limit: at most this many.
        """
        tasks = [task for task in self.manager.list_tasks(None) if task_id in ("", task.task_id)]
        now = self.manager.now()
        lines = [task.described(now) | shown_owner(task.owner) for task in tasks[: max(0, limit)]]
        for line in lines:
            for content in ("error", "progress"):
                line.pop(content, None)
        return {"count": len(tasks), "tasks": lines}
